"""Events of single processes, told by the agents that run them."""

from __future__ import annotations

from primeslurm.records.base import Event


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


ProcessEvent = ProcessStarted | ProcessStartFailed | ProcessExited
