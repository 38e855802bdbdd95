"""An environment that loads, and raises in every rollout."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "FailingTaskset"]


class FailingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Its reward cannot be computed."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        """Raise KeyError."""
        return float({"known": 1.0}[f"unknown-{self.data.idx}"])


class FailingTaskset(vf.Taskset[FailingTask, vf.TasksetConfig]):  # type: ignore[misc]
    """As many tasks as are asked for."""

    def load(self) -> Iterator[FailingTask]:
        """Yield the tasks."""
        for _ in range(1_000_000):
            yield FailingTask(vf.TaskData(prompt="Reverse: ab"), self.config.task)
