"""When to start, restart or give up on one process. Pure: observations and a clock in, a decision out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from primeslurm.base.errors import signature
from primeslurm.base.units import duration
from primeslurm.plan.model import Process
from primeslurm.records.fleet import RestartOrder
from primeslurm.wire import exit_codes

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits before the first, second, ... restart; the last one repeats."""
STABLE_S = 300.0
"""A process that ran this long has earned a fresh restart count. Time in which it was silent does not count."""
TASK_ROLE = "environment"
"""Role of processes that what they run may kill. The orchestrator finds out which task does, and leaves it out."""


class ProcessState(StrEnum):
    """Life of a process, as its agent sees it."""

    WAITING = "waiting"
    """Not started: something it needs is not there yet."""
    LOADING = "loading"
    """Started, not ready yet."""
    READY = "ready"
    BACKOFF = "backoff"
    """Died; waits to be restarted."""
    FALLEN = "fallen"
    """Died; waits for the next generation of its restart group."""
    DONE = "done"
    """Ended by itself with exit code 0."""
    FAILED = "failed"
    """Ended and is not restarted any more."""
    STOPPED = "stopped"
    """Ended because the attempt ends."""


_OVER = (ProcessState.FALLEN, ProcessState.FAILED, ProcessState.DONE)
"""Only a new generation of its restart group starts it again."""
Decision = Literal["start", "kill", "end_hung", "nothing"]
"""`end_hung`: end it, and have it say first where it is."""


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
    generation: int = 0
    """Generation of its restart group that it was last started in."""
    renewing: bool = False
    """It is being ended only to be started anew: no fault of its own."""
    hung: bool = False
    """It is being ended because it hangs."""
    useless: int = 0
    """So often, most recently, it died without having done anything."""
    failed_starts: int = 0
    """So often, most recently, it ended alike before it was ready."""
    start_error: str = ""
    """With this error."""

    @property
    def running(self) -> bool:
        """Whether an operating-system process exists."""
        return self.state in (ProcessState.LOADING, ProcessState.READY)

    def tick(
        self,
        now: float,
        *,
        prerequisites: bool,
        ready: bool,
        hangs: str = "",
        silent_s: float = 0.0,
        order: RestartOrder | None = None,
    ) -> Decision:
        """Decide what to do now.

        Args:
            now: the clock, in seconds.
            prerequisites: what it needs is there.
            ready: it answers (or has no health check and runs).
            hangs: it has been silent for too long: for how long, and where; else empty.
            silent_s: how long it has been silent.
            order: for a member of a restart group, what the head says of the group.
        """
        if order is not None and order.generation > self.generation and self.running:
            return self.renew("its unit is restarted")
        if self.running:
            return self._watch(now, ready, hangs, silent_s)
        if not prerequisites or (order is not None and order.hold):
            return "nothing"
        if self.state is ProcessState.WAITING:
            return "start"
        if self.state in _OVER and order is not None and order.generation > self.generation:
            return "start"
        if self.state is ProcessState.BACKOFF:
            wait = BACKOFF_S[max(0, min(self._charged, len(BACKOFF_S)) - 1)]
            return "start" if now - self.since >= wait else "nothing"
        return "nothing"

    def renew(self, reason: str) -> Decision:
        """Have the process ended, to be started anew.

        Args:
            reason: why, in words.

        Returns:
            "kill", or "nothing" if that was said before.
        """
        if self.renewing:
            return "nothing"
        self.renewing, self.reason = True, reason
        return "kill"

    def started(self, now: float, generation: int = 0) -> None:
        """Take in that the process was started, in a generation of its restart group if it has one."""
        self.started_at, self.exit_code, self.generation = now, None, generation
        self.renewing, self.hung, self.reason = False, False, ""
        self._become(ProcessState.LOADING, now)

    def postponed(self, now: float) -> None:
        """Take in that the process could not be started for now, and not for a fault of its own: it is tried again."""
        self._become(ProcessState.WAITING, now)

    def exited(self, now: float, code: int, *, ending: bool, served: bool = False) -> None:
        """Take in that the process ended.

        Args:
            now: the clock, in seconds.
            code: its exit code; negative: by that signal.
            ending: the attempt ends, so that it is not started again.
            served: it had begun its work. An environment worker that dies then is restarted without limit, because a
                task of the environment may have killed it.
        """
        if served:
            self.useless = 0
        self.exit_code = code
        if self.state is ProcessState.LOADING and not ending and not self.renewing:
            self._start_failed(self.reason if code > 0 else "")
        if ending:
            self._become(ProcessState.STOPPED, now)
        elif self.renewing:
            self._become(ProcessState.WAITING, now)
        elif code == 0 and self.process.health is None and not self._runs_tasks:
            self._become(ProcessState.DONE, now)
        elif self.process.restart == "unit":
            self.restarts += 1
            self._become(ProcessState.FALLEN, now)
        elif self._restartable and (self._runs_tasks or code not in (exit_codes.STALLED, exit_codes.UNRECOVERABLE)):
            self.restarts += 1
            self.useless += not served
            self._become(ProcessState.BACKOFF, now)
        else:
            self._become(ProcessState.FAILED, now)

    def _watch(self, now: float, ready: bool, hangs: str, silent_s: float) -> Decision:
        health = self.process.health
        if self.state is ProcessState.LOADING:
            if ready:
                self.failed_starts, self.start_error = 0, ""
                self._become(ProcessState.READY, now)
            elif health and now - self.started_at > health.start_timeout_s:
                self.reason = f"not ready within {duration(health.start_timeout_s)}"
                return "kill"
            return "nothing"
        if hangs:
            if self.hung:
                return "nothing"
            self.hung, self.reason = True, hangs
            return "end_hung"
        if now - silent_s - self.started_at > STABLE_S:
            self.restarts = 0
        return "nothing"

    def _start_failed(self, error: str) -> None:
        """Count starts that end alike. One that ended without a word is like no other."""
        alike = bool(error) and signature(error) == signature(self.start_error)
        self.failed_starts = self.failed_starts + 1 if alike else int(bool(error))
        self.start_error = error

    @property
    def _restartable(self) -> bool:
        return self.process.restart == "in_place" and self._charged < self.process.max_restarts

    @property
    def _runs_tasks(self) -> bool:
        """Whether a task may end the process in any way, exit codes that mean something elsewhere included."""
        return self.process.role == TASK_ROLE

    @property
    def _charged(self) -> int:
        """How many of the restarts count towards the limit, and make the wait before the next one longer."""
        return self.useless if self._runs_tasks else self.restarts

    def _become(self, state: ProcessState, now: float) -> None:
        self.state, self.since = state, now
