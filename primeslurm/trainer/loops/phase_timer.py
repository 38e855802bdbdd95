"""Where the trainer is and how long each phase took: the state that a stall watchdog reads."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from primeslurm.recipe.phase_limits import PhaseLimits
from primeslurm.records.heartbeats import liveness
from primeslurm.records.journal import Journal
from primeslurm.records.state import TrainerState


class PhaseTimer:
    """Times phases, beats at each change, and records it in the journal's state if `record`."""

    def __init__(self, journal: Journal, record: bool, limits: PhaseLimits | None = None) -> None:
        self.step = 0
        self.journal = journal
        self.steps_done = 0
        """Since the process began."""
        self._record = record
        self._limits = limits
        self._seconds: dict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Spend the body's time on `name`."""
        if self._record:
            self.journal.state(TrainerState(self.step, name, dict(self._seconds), self._last))
        limits = self._limits
        limit_s = limits.of_phase(name, first_step=not self.steps_done) if limits else 0.0
        liveness().enter(name, self.step, limit_s)
        begin = time.monotonic()
        try:
            yield
        finally:
            liveness().enter(f"after {name}", self.step)
            self._last[name] = time.monotonic() - begin
            self._seconds[name] += self._last[name]

    def took(self, name: str, seconds: float) -> None:
        """Record how long the last `name` took as a whole, if it went on beside other phases."""
        self._last[name] = seconds

    def seconds(self, name: str) -> float:
        """Return the seconds spent on a phase since the last `take`."""
        return self._seconds[name]

    def take(self) -> dict[str, float]:
        """Return seconds by phase as metrics, counted from the last call: a step is done."""
        self.steps_done += 1
        metrics = {f"seconds/{name}": spent for name, spent in self._seconds.items()}
        self._seconds.clear()
        return metrics
