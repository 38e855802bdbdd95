"""An environment that loads: words, with arguments of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "WordsTaskset"]


class WordsConfig(vf.TasksetConfig):  # type: ignore[misc]
    difficulty: Literal["easy", "hard"] = "easy"
    n: int = 4


class WordsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Every answer is right."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        return 1.0


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):  # type: ignore[misc]
    """`n` tasks; the generator would not end soon if all were read."""

    def load(self) -> Iterator[WordsTask]:
        for i in range(self.config.n):
            yield WordsTask(vf.TaskData(prompt=f"Reverse: {'ab' * (i + 1)}"), self.config.task)
