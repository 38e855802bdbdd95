"""An environment whose tasks want a container, and whose harness has tools that it cannot use."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness
from tests.support.environments.broken_tool import BrokenTools

__all__ = ["BoxTaskset", "ChatHarness"]


class BoxTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Writes where it likes."""

    NEEDS_CONTAINER = True

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return a tool server."""
        return [BrokenTools(vf.ToolsetConfig())]


class BoxTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):  # type: ignore[misc]
    """One task."""

    def load(self) -> Iterator[BoxTask]:
        """Yield it."""
        yield BoxTask(vf.TaskData(prompt="?"), self.config.task)
