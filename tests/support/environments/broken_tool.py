"""An environment with a tool server that ends before it listens."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ToolHarness", "ToolTaskset"]


class ToolHarness(ChatHarness):
    """Says that it uses tools, which is enough for them to be started."""

    SUPPORTS_MCP = True


class BrokenTools(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    """Its set-up fails."""

    async def setup(self) -> None:
        """Raise FileNotFoundError."""
        raise FileNotFoundError("the index /data/wiki.faiss is not there")

    @vf.tool  # type: ignore[untyped-decorator]
    async def look_up(self, word: str) -> str:
        """Look up a word."""
        return word


class ToolTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Uses the tools."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the task's own tool server."""
        return [BrokenTools(vf.ToolsetConfig())]


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):  # type: ignore[misc]
    """As many tasks as are asked for."""

    def load(self) -> Iterator[ToolTask]:
        """Yield the tasks."""
        for _ in range(1_000_000):
            yield ToolTask(vf.TaskData(prompt="Reverse: ab"), self.config.task)


if __name__ == "__main__":
    BrokenTools.run()
