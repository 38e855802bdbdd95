"""`tool-use`: follow a chain of files with a shell, one file per turn.

Each file holds the name of the next one. The last file holds a number, which is the answer. A tiny model learns it in
minutes on a CPU: each turn copies a word of the last message, and the model decides whether to run a command or answer.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.runtimes import Runtime

from primeslurm.orchestrator.environments.shell import ShellHarness

__all__ = ["ShellHarness", "ToolUseTaskset"]

NAME_LETTERS = 4
PROMPT = "Follow "


class ToolUseData(vf.TaskData):  # type: ignore[misc]
    """One chain."""

    names: list[str]
    """Names of the files, in the order of the chain."""
    answer: str
    """Content of the last file."""


class ToolUseConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The arguments of the environment."""

    links: int = Field(2, ge=1, le=100)
    """Number of files in a chain. A rollout that finds the answer has one more turn."""
    seed: int = 0
    n: int = Field(10_000, ge=1)
    """Number of chains."""


class ToolUseTask(vf.Task[ToolUseData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Rewarded for the number at the end of the chain."""

    async def setup(self, runtime: Runtime) -> None:
        for name, content in zip(self.data.names, [*self.data.names[1:], self.data.answer], strict=True):
            await runtime.write(name, f"{content}\n".encode())

    @vf.reward  # type: ignore[untyped-decorator]
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is the answer and nothing else, else 0."""
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric  # type: ignore[untyped-decorator]
    async def commands(self, trace: vf.Trace) -> float:
        return float(sum(message.role == "tool" for message in trace.messages))


class ToolUseTaskset(vf.Taskset[ToolUseTask, ToolUseConfig]):  # type: ignore[misc]
    """Random chains. Chain i depends on the seed, but not on n."""

    def load(self) -> Iterator[ToolUseTask]:
        for names, answer in chains(self.config.n, self.config.seed, self.config.links):
            data = ToolUseData(prompt=PROMPT + names[0], names=names, answer=answer)
            yield ToolUseTask(data, self.config.task)


def chains(n: int, seed: int, links: int) -> Iterator[tuple[list[str], str]]:
    """Yield `n` chains: the distinct names of the files, and the number at the end."""
    rng = random.Random(seed)
    for _ in range(n):
        names: dict[str, None] = {}
        while len(names) < links:
            names["".join(rng.choices(string.ascii_lowercase, k=NAME_LETTERS))] = None
        yield list(names), str(rng.randint(100, 999))
