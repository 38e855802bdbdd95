"""A proposer and two solvers, all played by the policy. The solvers reverse a word with the proposer's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness
from primeslurm.orchestrator.environments.reverse_text import PROMPT, ReverseTextConfig, ReverseTextTask
from primeslurm.orchestrator.environments.reverse_text import ReverseTextTaskset as Words

__all__ = ["ChatHarness", "RelayEnv", "RelayTaskset"]


class RelayTaskset(Words):
    """Words of four letters."""

    def load(self) -> Iterator[ReverseTextTask]:
        four = ReverseTextConfig.model_validate({"min_length": 4, "max_length": 4, "seed": 2})
        yield from Words(four).load()


class RelayConfig(vf.EnvConfig):  # type: ignore[misc]
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class RelayEnv(vf.Env[RelayConfig]):  # type: ignore[misc]
    """All proposers of a group get the same word. The two solvers of a rollout get a word of their own."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let the solvers reverse the first letter of the proposal and three letters of the original word."""
        proposed = await agents.proposer.run(task)
        word = (proposed.last_reply or "").strip()[:1] + task.data.prompt.removeprefix(PROMPT)[:3]
        data = task.data.model_copy(update={"prompt": PROMPT + word, "answer": word[::-1]})
        await asyncio.gather(*(agents.solver.run(type(task)(data, task.config)) for _ in range(2)))
