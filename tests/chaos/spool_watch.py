"""Records every finished rollout group on disk, and when it is removed."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from primeslurm.base.files import read_json
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.run.directory import RunDirectory
from primeslurm.wire.stored import checkpoints

PERIOD_S = 0.4


@dataclass
class SeenGroup:
    """A group in the spool. Its id may return after a step was undone."""

    id: str
    opened: int
    """Policy version at its start."""
    newest: int
    """Newest policy version that sampled a token."""
    rollouts: int
    seen_at: float
    """In Unix seconds."""
    gone_at_step: int | None = None
    """Last trained step when the group was found removed; None while it exists."""
    gone_at: float = math.inf
    """In Unix seconds."""


class SpoolWatch(threading.Thread):
    """Polls the spool of a run until it is closed."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._present: dict[tuple[str, int], SeenGroup] = {}
        self.seen: list[SeenGroup] = []
        """In the order of their appearance."""
        self._closing = threading.Event()

    def run(self) -> None:
        """Poll until closed."""
        while not self._closing.wait(PERIOD_S):
            self._look()

    def close(self) -> list[SeenGroup]:
        """Poll for the last time, and return all groups."""
        self._closing.set()
        self.join()
        self._look()
        return self.seen

    def _look(self) -> None:
        files = {}
        for path in (self._run.path / "rollouts").glob("*.group"):
            try:
                status = path.stat()
            except OSError:
                continue
            files[path.name, status.st_ino ^ status.st_mtime_ns] = path
        for key in self._present.keys() - files.keys():
            gone = self._present.pop(key)
            gone.gone_at_step, gone.gone_at = self._step(), time.time()
        for key in files.keys() - self._present.keys():
            if (group := _read(files[key])) is not None:
                self._present[key] = group
                self.seen.append(group)

    def _step(self) -> int:
        """Return the newest committed or recorded step of any attempt: groups are removed with their step."""
        states = (self._run.path / "attempts").glob("*/state/orchestrator.json")
        recorded = max(((read_json(path) or {}).get("step") or 0 for path in states), default=0)
        return max(recorded, checkpoints.newest(self._run.path) or 0)


def _read(path: Path) -> SeenGroup | None:
    try:
        group = RolloutGroup.from_bytes(path.read_bytes())
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return SeenGroup(group.id, group.opened_version, group.newest_version, len(group.rollouts), time.time())
