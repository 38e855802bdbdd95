"""An environment whose tasks need a container, with a harness that cannot use its tools there."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness
from tests.support.environments.broken_tool import BrokenTools

__all__ = ["BoxTaskset", "ChatHarness"]


class BoxTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = True

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [BrokenTools(vf.ToolsetConfig())]


class BoxTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[BoxTask]:
        yield BoxTask(vf.TaskData(prompt="?"), self.config.task)
