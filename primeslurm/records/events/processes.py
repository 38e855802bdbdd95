"""Events of single processes, told by the agents that run them, and of routers, told by their keepers."""

from __future__ import annotations

from primeslurm.records.record import Event


class ProcessStarted(Event, frozen=True, tag="started"):
    """An agent started a process."""

    name: str
    pid: int | None = None
    restarts: int = 0
    """How often it was started before, in place."""
    generation: int = 0
    """Generation of its restart group."""


class ProcessStartFailed(Event, frozen=True, tag="start_failed"):
    """An agent could not start a process."""

    name: str
    error: str = ""


class ProcessExited(Event, frozen=True, tag="exited"):
    """A process ended."""

    name: str
    code: int | None = None
    """Exit code; negative: by that signal."""
    state: str = ""
    """State that its agent has put it into."""
    reason: str | None = None


class ProcessUnresponsive(Event, frozen=True, tag="hangs"):
    """An agent ends a process that has been silent for too long. Its log gets the stacks of its threads first."""

    name: str
    seconds: float
    """Of silence, without the time for which it cannot be blamed."""
    phase: str = ""
    """What it did, in its own words."""
    step: int | None = None
    reason: str = ""


class ProcessContinued(Event, frozen=True, tag="continued"):
    """An agent continued a process that was stopped by a signal."""

    name: str
    seconds: float
    """Of silence until then."""


class RanksUnresponsive(Event, frozen=True, tag="ranks_wait"):
    """By the head: trainer ranks wait for others that do not come."""

    behind: list[str]
    """Those that do not come; all of them if none is behind the others."""
    waiting: int
    """How many wait."""
    phase: str = ""
    step: int | None = None
    seconds: float = 0.0
    """For which those behind have been silent."""


class RouterIncomplete(Event, frozen=True, tag="router_incomplete", omit_defaults=True):
    """A router's keeper found that it does not serve the workers of the plan, and puts that right."""

    serves: int
    """So many of the plan's workers."""
    planned: int
    missing: list[str] = []
    """URLs."""
    foreign: list[str] = []
    """URLs that the plan does not have."""


class RouterComplete(Event, frozen=True, tag="router_complete"):
    """A router serves the workers of the plan again."""

    planned: int
    seconds: float = 0.0
    """Since it was found out that it did not."""


class RouterRestarted(Event, frozen=True, tag="router_restarted"):
    """A router's keeper starts it anew: what was in flight through it fails, and is asked for again."""

    reason: str


class StorageFault(Event, frozen=True, tag="storage_fault"):
    """The shared file system did not answer a process for a while. Further faults within a minute are not told."""

    path: str
    error: str = ""
    failures: int = 0
    """Tries that failed."""
    seconds: float = 0.0
    """From the first failure on."""
    recovered: bool = True
    """False: the process gave the operation up. What that means for it, it says itself."""


ProcessEvent = (
    ProcessStarted
    | ProcessStartFailed
    | ProcessExited
    | ProcessUnresponsive
    | ProcessContinued
    | RanksUnresponsive
    | RouterIncomplete
    | RouterComplete
    | RouterRestarted
    | StorageFault
)
