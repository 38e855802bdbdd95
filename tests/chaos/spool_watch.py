"""Sees every finished group of rollouts that is put on disk, and when it goes."""

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
    """A group that was in the spool. The same id may come again, after a step was undone."""

    id: str
    opened: int
    """Policy version under which it began."""
    newest: int
    """Newest policy version that sampled any of it."""
    rollouts: int
    seen_at: float
    """Unix seconds."""
    gone_at_step: int | None = None
    """The last step that was trained when it was not there any more; None while it is there."""
    gone_at: float = math.inf
    """Unix seconds."""


class SpoolWatch(threading.Thread):
    """Looks into the spool of a run until it is closed."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._present: dict[tuple[str, int], SeenGroup] = {}
        self.seen: list[SeenGroup] = []
        """In the order in which they came."""
        self._closing = threading.Event()

    def run(self) -> None:
        """Look, again and again."""
        while not self._closing.wait(PERIOD_S):
            self._look()

    def close(self) -> list[SeenGroup]:
        """Look for the last time; returns all groups."""
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
        """The newest step that is committed, or that any attempt has recorded: groups go as soon as theirs is."""
        states = (self._run.path / "attempts").glob("*/state/orchestrator.json")
        recorded = max(((read_json(path) or {}).get("step") or 0 for path in states), default=0)
        return max(recorded, checkpoints.newest(self._run.path) or 0)


def _read(path: Path) -> SeenGroup | None:
    try:
        group = RolloutGroup.from_bytes(path.read_bytes())
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return SeenGroup(group.id, group.opened_version, group.newest_version, len(group.rollouts), time.time())
