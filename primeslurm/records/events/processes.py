"""Events of single processes, written by their agents, and of routers, written by their supervisors."""

from __future__ import annotations

from primeslurm.records.record import Event


class ProcessStarted(Event, frozen=True, tag="started"):
    """An agent started a process."""

    name: str
    pid: int | None = None
    restarts: int = 0  # earlier restarts in place
    generation: int = 0  # generation of its restart group


class ProcessStartFailed(Event, frozen=True, tag="start_failed"):
    """An agent could not start a process."""

    name: str
    error: str = ""


class ProcessExited(Event, frozen=True, tag="exited"):
    """A process ended."""

    name: str
    code: int | None = None  # exit code; negative: number of the signal that killed it
    state: str = ""  # state that its agent has put it into
    reason: str | None = None


class ProcessUnresponsive(Event, frozen=True, tag="hangs"):
    """An agent ends an unresponsive process. Its log gets the stacks of its threads first."""

    name: str
    seconds: float  # since the last heartbeat, without time in which the process could not run
    phase: str = ""
    step: int | None = None
    reason: str = ""


class ProcessContinued(Event, frozen=True, tag="continued"):
    """An agent continued a process that a signal had stopped."""

    name: str
    seconds: float  # since the last heartbeat


class RanksUnresponsive(Event, frozen=True, tag="ranks_wait"):
    """No trainer rank makes progress. Written by the head."""

    behind: list[str]  # ranks that the others wait for; all ranks if none is behind
    waiting: int  # ranks that wait
    phase: str = ""
    step: int | None = None
    seconds: float = 0.0  # since the last heartbeat of the ranks behind


class RouterIncomplete(Event, frozen=True, tag="router_incomplete", omit_defaults=True):
    """A router does not have the workers of the Plan. Its supervisor corrects that."""

    serves: int  # workers of the Plan that it has
    planned: int
    missing: list[str] = []  # URLs
    foreign: list[str] = []  # URLs that are not in the Plan


class RouterComplete(Event, frozen=True, tag="router_complete"):
    """A router has the workers of the Plan again."""

    planned: int
    seconds: float = 0.0  # since the difference was noticed


class RouterRestarted(Event, frozen=True, tag="router_restarted"):
    """A supervisor restarts its router. Requests in flight fail and are retried."""

    reason: str


class StorageFault(Event, frozen=True, tag="storage_fault"):
    """The shared file system failed a process's operation. Further faults within a minute are not reported."""

    path: str
    error: str = ""
    failures: int = 0  # failed tries
    seconds: float = 0.0  # since the first failure
    recovered: bool = True  # False: the process gave up the operation
