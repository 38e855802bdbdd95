"""An environment with two agents of the policy, which reverse short and long words for different rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness
from primeslurm.orchestrator.environments.reverse_text import PROMPT, ReverseTextConfig, ReverseTextTask
from primeslurm.orchestrator.environments.reverse_text import ReverseTextTaskset as Words

__all__ = ["ChatHarness", "DuelEnv", "DuelTaskset"]


class DuelTaskset(Words):
    """Words of eight letters."""

    def load(self) -> Iterator[ReverseTextTask]:
        eight = ReverseTextConfig.model_validate({"min_length": 8, "max_length": 8, "seed": 1})
        yield from Words(eight).load()


class DuelConfig(vf.EnvConfig):  # type: ignore[misc]
    short: vf.AgentConfig = vf.AgentConfig()
    long: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):  # type: ignore[misc]
    """Each agent plays once per rollout, and both are trained."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let one agent reverse the first half of the other's word."""
        half = task.data.prompt.removeprefix(PROMPT)[:4]
        data = task.data.model_copy(update={"prompt": PROMPT + half, "answer": half[::-1]})
        await asyncio.gather(agents.short.run(type(task)(data, task.config)), agents.long.run(task))
