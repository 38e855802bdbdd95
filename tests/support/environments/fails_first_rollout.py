"""An environment that loads, and fails in every rollout."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ChatHarness", "FailingTaskset"]


class FailingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A task whose reward cannot be computed."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        return float({"known": 1.0}[f"unknown-{self.data.idx}"])


class FailingTaskset(vf.Taskset[FailingTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[FailingTask]:
        for _ in range(1_000_000):
            yield FailingTask(vf.TaskData(prompt="Reverse: ab"), self.config.task)
