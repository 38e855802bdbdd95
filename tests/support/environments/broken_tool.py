"""An environment whose tool server ends before it listens."""

from __future__ import annotations

from collections.abc import Iterator

if __name__ == "__main__":  # before the import of verifiers, which takes seconds
    raise FileNotFoundError("the index /data/wiki.faiss is not there")

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["ToolHarness", "ToolTaskset"]


class ToolHarness(ChatHarness):
    """Declares that it uses tools, so that they are started."""

    SUPPORTS_MCP = True


class BrokenTools(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    """Tools whose server fails."""

    @vf.tool  # type: ignore[untyped-decorator]
    async def look_up(self, word: str) -> str:
        return word


class ToolTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [BrokenTools(vf.ToolsetConfig())]


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[ToolTask]:
        for _ in range(1_000_000):
            yield ToolTask(vf.TaskData(prompt="Reverse: ab"), self.config.task)
