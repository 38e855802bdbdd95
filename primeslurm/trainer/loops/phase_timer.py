"""Where the trainer is and how long each phase took: the state that a stall watchdog reads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from primeslurm.records.journal import Journal
from primeslurm.records.state import TrainerState


class PhaseTimer:
    """Times phases, and records each phase change in the journal's state if `record`."""

    def __init__(self, journal: Journal, record: bool) -> None:
        self.step = 0
        self.journal = journal
        self._record = record
        self._seconds: dict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Spend the body's time on `name`."""
        if self._record:
            self.journal.state(TrainerState(self.step, name, dict(self._seconds), self._last))
        begin = time.monotonic()
        try:
            yield
        finally:
            self._last[name] = time.monotonic() - begin
            self._seconds[name] += self._last[name]

    def took(self, name: str, seconds: float) -> None:
        """Record how long the last `name` took as a whole, if it went on beside other phases."""
        self._last[name] = seconds

    def seconds(self, name: str) -> float:
        """Return the seconds spent on a phase since the last `take`."""
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Return seconds by phase as metrics, counted from the last call."""
        metrics = {f"seconds/{name}": spent for name, spent in self._seconds.items()}
        self._seconds.clear()
        return metrics
