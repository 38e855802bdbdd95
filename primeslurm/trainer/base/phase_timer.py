"""The trainer's current phase and the time spent in each, for heartbeats, the journal and metrics."""

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
    """Times phases and sends a heartbeat at each change. With `record`, it also writes the phase to the journal."""

    def __init__(self, journal: Journal, record: bool, limits: PhaseLimits | None = None) -> None:
        self.step = 0
        self.journal = journal
        self.steps_done = 0  # steps since this process started
        self._record = record
        self._limits = limits
        self._seconds: dict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}
        self._taken_at = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
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
        """Set the seconds of phase `name`, which ran in the background of other phases, to those of its last run."""
        self._last[name] = seconds

    def seconds(self, name: str) -> float:
        """Return the seconds spent on a phase since the last `take`."""
        return self._seconds[name]

    def take(self, gpus: int) -> dict[str, float]:
        """End a step: return metrics of the time per phase since the last call, for `gpus` GPUs, and begin again."""
        self.steps_done += 1
        now = time.monotonic()
        elapsed_s, self._taken_at = now - self._taken_at, now
        metrics = {
            "gpu_hours": gpus * elapsed_s / 3600,
            "idle_fraction": self._seconds.get("wait", 0.0) / max(elapsed_s, 1e-9),
        }
        metrics |= {f"seconds/{name}": spent for name, spent in self._seconds.items()}
        self._seconds.clear()
        return metrics
