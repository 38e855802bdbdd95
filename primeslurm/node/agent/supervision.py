"""State machine of one process: decides when to start, restart, end or give it up. Pure; the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from primeslurm.base.errors import signature
from primeslurm.base.units import duration
from primeslurm.plan.model import Process
from primeslurm.records.fleet import RestartOrder
from primeslurm.wire import exit_codes

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # waits before the first, second, ... restart. The last one repeats.
STABLE_S = 300.0  # a process that was ready and responded for this long gets a new restart budget
# Role of processes that a task may kill. The orchestrator finds out which task does it, and skips the task.
TASK_ROLE = "environment"


class ProcessState(StrEnum):
    """State of a process, as its agent sees it."""

    WAITING = "waiting"  # not started: a prerequisite is missing
    LOADING = "loading"  # started, not ready yet
    READY = "ready"
    BACKOFF = "backoff"  # died; waits for its restart
    FALLEN = "fallen"  # died; waits for the next generation of its restart group
    DONE = "done"  # exited with code 0
    FAILED = "failed"  # ended, and is not restarted
    STOPPED = "stopped"  # ended because the attempt ends


# Only a new generation of the restart group starts such a process again.
_OVER = (ProcessState.FALLEN, ProcessState.FAILED, ProcessState.DONE)
# `dump_and_kill`: the process writes the stacks of its threads to its log before it is killed.
Decision = Literal["start", "kill", "dump_and_kill", "nothing"]


@dataclass
class Supervision:
    """State of one process. The agent calls `tick`, and reports starts and exits."""

    process: Process
    state: ProcessState = ProcessState.WAITING
    restarts: int = 0
    exit_code: int | None = None
    started_at: float = 0.0
    since: float = 0.0  # begin of this state
    reason: str = ""
    generation: int = 0  # generation of its restart group at its last start
    renewing: bool = False  # it is being ended for a planned restart, which does not use up its restart budget
    unresponsive: bool = False  # it is being ended because it is unresponsive
    idle_deaths: int = 0  # consecutive deaths before any work
    failed_starts: int = 0  # consecutive starts that failed with `start_error`
    start_error: str = ""

    @property
    def running(self) -> bool:
        return self.state in (ProcessState.LOADING, ProcessState.READY)

    def tick(
        self,
        now: float,
        *,
        prerequisites: bool,
        ready: bool,
        unresponsive: str = "",
        silent_s: float = 0.0,
        order: RestartOrder | None = None,
    ) -> Decision:
        """Decide what to do now.

        Args:
            now: monotonic clock [s].
            prerequisites: everything that the process needs is there.
            ready: it answers its health check, or runs and has none.
            unresponsive: why it counts as unresponsive; empty if it responds.
            silent_s: age of its last heartbeat [s].
            order: the head's order for its restart group, if it has one.
        """
        if order is not None and order.generation > self.generation and self.running:
            return self.renew("its restart group is restarted")
        if self.running:
            return self._watch(now, ready, unresponsive, silent_s)
        if not prerequisites or (order is not None and order.hold):
            return "nothing"
        if self.state is ProcessState.WAITING:
            return "start"
        if self.state in _OVER and order is not None and order.generation > self.generation:
            return "start"
        if self.state is ProcessState.BACKOFF:
            wait = BACKOFF_S[max(0, min(self._charged_restarts, len(BACKOFF_S)) - 1)]
            return "start" if now - self.since >= wait else "nothing"
        return "nothing"

    def renew(self, reason: str) -> Decision:
        """Request a restart that does not count. Return "kill" the first time, and "nothing" afterwards."""
        if self.renewing:
            return "nothing"
        self.renewing, self.reason = True, reason
        return "kill"

    def started(self, now: float, generation: int = 0) -> None:
        self.started_at, self.exit_code, self.generation = now, None, generation
        self.renewing, self.unresponsive, self.reason = False, False, ""
        self._become(ProcessState.LOADING, now)

    def postponed(self, now: float) -> None:
        """Note that the process could not be started for a reason outside of it. The start is retried."""
        self._become(ProcessState.WAITING, now)

    def exited(self, now: float, code: int, *, ending: bool, served: bool = False) -> None:
        """Note that the process ended with an exit code, or by a signal if the code is negative.

        `ending`: the attempt ends, so the process is not started again. `served`: its main loop had sent heartbeats.
        """
        if served:
            self.idle_deaths = 0
        self.exit_code = code
        if self.state is ProcessState.LOADING and not ending and not self.renewing:
            self._count_failed_start(self.reason if code > 0 else "")
        restartable = self.process.restart == "in_place" and self._charged_restarts < self.process.max_restarts
        if ending:
            self._become(ProcessState.STOPPED, now)
        elif self.renewing:
            self._become(ProcessState.WAITING, now)
        elif code == 0 and self.process.health is None and not self._runs_tasks:
            self._become(ProcessState.DONE, now)
        elif self.process.restart == "unit":
            self.restarts += 1
            self._become(ProcessState.FALLEN, now)
        elif restartable and (self._runs_tasks or code not in (exit_codes.STALLED, exit_codes.UNRECOVERABLE)):
            self.restarts += 1
            self.idle_deaths += not served
            self._become(ProcessState.BACKOFF, now)
        else:
            self._become(ProcessState.FAILED, now)

    def _watch(self, now: float, ready: bool, unresponsive: str, silent_s: float) -> Decision:
        health = self.process.health
        if self.state is ProcessState.LOADING:
            if ready:
                self.failed_starts, self.start_error = 0, ""
                self._become(ProcessState.READY, now)
            elif health and now - self.started_at > health.start_timeout_s:
                self.reason = f"not ready within {duration(health.start_timeout_s)}"
                return "kill"
            return "nothing"
        if unresponsive:
            if self.unresponsive:
                return "nothing"
            self.unresponsive, self.reason = True, unresponsive
            return "dump_and_kill"
        # Loading does not count, nor does the time since the last heartbeat: a process that dies or stops responding
        # right after each start would otherwise earn a new restart budget.
        if now - silent_s - self.since > STABLE_S:
            self.restarts = 0
        return "nothing"

    def _count_failed_start(self, error: str) -> None:
        # A start that failed without a message resembles no other.
        alike = bool(error) and signature(error) == signature(self.start_error)
        self.failed_starts = self.failed_starts + 1 if alike else int(bool(error))
        self.start_error = error

    @property
    def _runs_tasks(self) -> bool:
        # A task can end its worker with any exit code, those included that mean something elsewhere.
        return self.process.role == TASK_ROLE

    @property
    def _charged_restarts(self) -> int:
        # A worker that died at work was probably killed by a task, so only deaths before any work use up its budget.
        return self.idle_deaths if self._runs_tasks else self.restarts

    def _become(self, state: ProcessState, now: float) -> None:
        self.state, self.since = state, now
