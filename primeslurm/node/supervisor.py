"""When to start, restart or give up on one process. Pure: observations and a clock in, a decision out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from primeslurm.plan.model import Process
from primeslurm.wire import exits

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits before the first, second, ... restart; the last one repeats."""
STABLE_S = 300.0
"""A process that ran this long has earned a fresh restart count."""


class ProcessState(StrEnum):
    """Life of a process, as its agent sees it."""

    WAITING = "waiting"
    """Not started: something it needs is not there yet."""
    LOADING = "loading"
    """Started, not ready yet."""
    READY = "ready"
    BACKOFF = "backoff"
    """Died; waits to be restarted."""
    DONE = "done"
    """Ended by itself with exit code 0."""
    FAILED = "failed"
    """Ended and is not restarted any more."""
    STOPPED = "stopped"
    """Ended because the attempt ends."""


Decision = Literal["start", "kill", "nothing"]


@dataclass
class Supervision:
    """The state machine of one process. Its agent calls `tick` and reports starts and exits."""

    process: Process
    state: ProcessState = ProcessState.WAITING
    restarts: int = 0
    exit_code: int | None = None
    started_at: float = 0.0
    since: float = 0.0
    reason: str = ""

    @property
    def running(self) -> bool:
        """Whether an operating-system process exists."""
        return self.state in (ProcessState.LOADING, ProcessState.READY)

    def tick(self, now: float, *, prerequisites: bool, ready: bool) -> Decision:
        """What to do now. `ready`: it answers (or has no health check and runs)."""
        if self.state is ProcessState.WAITING:
            return "start" if prerequisites else "nothing"
        if self.state is ProcessState.BACKOFF:
            wait = BACKOFF_S[min(self.restarts, len(BACKOFF_S)) - 1]
            return "start" if prerequisites and now - self.since >= wait else "nothing"
        if self.state is ProcessState.LOADING:
            if ready:
                self._become(ProcessState.READY, now)
            elif self.process.health and now - self.started_at > self.process.health.start_timeout_s:
                self.reason = f"not ready within {self.process.health.start_timeout_s} s"
                return "kill"
        if self.state is ProcessState.READY and now - self.started_at > STABLE_S:
            self.restarts = 0
        return "nothing"

    def started(self, now: float) -> None:
        """The process was started."""
        self.started_at, self.exit_code = now, None
        self._become(ProcessState.LOADING, now)

    def exited(self, now: float, code: int, *, ending: bool) -> None:
        """The process ended with `code` (negative: by that signal)."""
        self.exit_code = code
        if ending:
            self._become(ProcessState.STOPPED, now)
        elif code == 0:
            self._become(ProcessState.DONE, now)
        elif self._restartable and code != exits.STALLED:
            self.restarts += 1
            self._become(ProcessState.BACKOFF, now)
        else:
            self._become(ProcessState.FAILED, now)

    @property
    def _restartable(self) -> bool:
        return self.process.restart == "in_place" and self.restarts < self.process.max_restarts

    def _become(self, state: ProcessState, now: float) -> None:
        self.state, self.since = state, now
