"""An environment whose first task cannot be read."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from primeslurm.orchestrator.environments.chat import ChatHarness

__all__ = ["BrokenTaskset", "ChatHarness"]


class BrokenTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):  # type: ignore[misc]
    """Rows that lack a column."""

    def load(self) -> Iterator[vf.Task]:
        rows: list[dict[str, str]] = [{"question": "?"}]
        for row in rows:
            yield vf.Task(vf.TaskData(prompt=row["prompt"]), self.config.task)
