"""Failures of an attempt, derived from its events: time, component, node, and whether the run recovered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from primeslurm.base.units import duration
from primeslurm.records.events import nodes
from primeslurm.records.events.policy import EngineAnswersDamaged, EngineUpdateFailed
from primeslurm.records.events.processes import (
    ProcessContinued,
    ProcessExited,
    ProcessStarted,
    ProcessStartFailed,
    RanksUnresponsive,
    RouterComplete,
    RouterIncomplete,
    RouterRestarted,
)
from primeslurm.records.events.training import EnvironmentFails, Stalled, StepTrained, TaskGivenUp
from primeslurm.records.fleet import AgentReport, FleetView
from primeslurm.records.record import Event
from primeslurm.run.status.event_text import DIED, describe_wait, exit_text, rank_names, words_of
from primeslurm.wire import exit_codes

# A node is lost if its last heartbeat is older than this at the end of the attempt; else it ended with the others.
SILENT_S = 20.0
# Component, and suspect, of faults that no node causes.
FILE_SYSTEM = "shared file system"
_SILENCE = re.compile(r"silent for (\d+) s")


class Failure(msgspec.Struct, frozen=True):
    """A failure of one component."""

    time: float  # Unix time of the failure
    component: str  # process, agent or node
    node: str  # name of its node; empty if unknown
    how: str
    code: int | None = None  # exit code; a negative number is a signal
    recovered: bool = False  # the component works again


def failures(events: Sequence[Event], heartbeats: Iterable[AgentReport]) -> list[Failure]:
    """Return all failures of an attempt, in order of time.

    `events` are those of all processes in order of time, and `heartbeats` has the last one of every node.
    """
    hosts = {event.process: event.node for event in events if isinstance(event, nodes.AgentStarted)}
    all_failures = [failure for event in events if (failure := _of_event(event, hosts)) is not None]
    all_failures += _lost_nodes(events, heartbeats)
    all_failures += _unexplained_end(events, all_failures)
    return _with_recovery(sorted(all_failures, key=lambda failure: failure.time), events)


def unresponsive_processes(fleet: FleetView | None) -> list[Failure]:
    """Return the processes that the head of a running attempt reports as unresponsive."""
    if fleet is None or fleet.ending:
        return []
    return [Failure(fleet.time - beat.silent_s, name, "", f"is {beat.text}") for name, beat in fleet.silent.items()]


def _of_event(event: Event, hosts: Mapping[str, str]) -> Failure | None:
    at, by = event.time, event.process
    host = hosts.get(by, "")
    match event:
        case ProcessExited(name=name, code=code) if event.state in DIED and code != exit_codes.CHECKPOINTED:
            why = f" ({event.reason})" if event.reason else ""
            return Failure(at, name, host, exit_text(code) + why, code)
        case nodes.NodeLost(node=node, reason=reason):
            return Failure(at - _seconds_silent(reason), f"node {node}", node, reason)
        case ProcessContinued(name=name, seconds=seconds):
            return Failure(
                at - seconds,
                name,
                host,
                f"was stopped by a signal for {duration(seconds)}, and continued",
                recovered=True,
            )
        case RanksUnresponsive(behind=[first, *_]):
            return Failure(at - event.seconds, first, "", f"{rank_names(event)}: {describe_wait(event)}")
        case nodes.FileSystemFault(what=what) if what:
            return Failure(at, FILE_SYSTEM, "", f"keeps the run waiting: {what}")
        case RouterRestarted(reason=reason):
            return Failure(at, by, host, f"was restarted: {reason}", recovered=True)
        case nodes.AgentFailed(error=error) | nodes.HeadFailed(error=error):
            return Failure(at, by, host, f"failed: {error}")
        case ProcessStartFailed() | RouterIncomplete():
            return _as_told(event, host)
        case EngineUpdateFailed() | EngineAnswersDamaged() | EnvironmentFails():
            return _as_told(event)
        case TaskGivenUp():
            return _as_told(event, recovered=True)
        case Stalled(suspect=suspect, error=error):
            why = error or f"no finished rollout and no new policy for {duration(event.seconds or 0)}"
            return Failure(at, suspect, "", f"no progress: {why}")
        case _:
            return None


def _as_told(event: Event, node: str = "", recovered: bool = False) -> Failure:
    told = words_of(event)
    assert told is not None
    return Failure(event.time, told.who, node, told.text, recovered=recovered)


def _lost_nodes(events: Sequence[Event], heartbeats: Iterable[AgentReport]) -> list[Failure]:
    end = next((event.time for event in events if isinstance(event, nodes.AttemptEnds)), None)
    if end is None:
        return []
    reported = {event.node for event in events if isinstance(event, nodes.NodeLost)}
    unreported = [beat for beat in heartbeats if not beat.ended and beat.name not in reported]
    silent = [beat for beat in unreported if beat.time < end - SILENT_S]
    return [
        Failure(beat.time, f"node {beat.name}", beat.name, f"last heartbeat {duration(end - beat.time)} before the end")
        for beat in silent
    ]


def _unexplained_end(events: Sequence[Event], others: Sequence[Failure]) -> list[Failure]:
    # The head names a suspect. If no other event reports a failure of it, the head's reason is the only record.
    ending = next((e for e in events if isinstance(e, nodes.AttemptEnds) and e.process == "head"), None)
    if ending is None or ending.outcome != "failed":
        return []
    suspect = ending.suspect or "head"
    if any(suspect in (failure.component, failure.node) for failure in others):
        return []
    return [Failure(ending.time - _seconds_silent(ending.reason), suspect, "", ending.reason)]


def _seconds_silent(reason: str) -> float:
    """Return how many seconds ago the node failed when the head gave it up."""
    match = _SILENCE.search(reason)
    return float(match[1]) if match else 0.0


def _with_recovery(all_failures: list[Failure], events: Sequence[Event]) -> list[Failure]:
    started = {
        event.name if isinstance(event, ProcessStarted) else event.process: event.time
        for event in events
        if isinstance(event, ProcessStarted | RouterComplete)
    }
    last = {failure.component: failure.time for failure in all_failures}
    lost = {f"node {event.node}" for event in events if isinstance(event, nodes.NodeLost)}
    disk_free = max(
        (event.time for event in events if isinstance(event, nodes.FileSystemFault) and not event.what), default=0.0
    )
    reasons = [event.reason for event in events if isinstance(event, nodes.ProcessesGivenUp | nodes.AttemptEnds)]

    last_step = max((event.time for event in events if isinstance(event, StepTrained)), default=0.0)
    stalls = {(event.behind[0], event.time - event.seconds) for event in events if isinstance(event, RanksUnresponsive)}

    def has_recovered(failure: Failure) -> bool:
        name = failure.component
        if name == FILE_SYSTEM:
            return failure.time < disk_free
        if failure.recovered:
            return True
        if (name, failure.time) in stalls:
            return last_step > failure.time
        if name in lost:
            # A spare replaced the node, or the node was a spare. Otherwise an event names it as a reason.
            return not any(f"{name}:" in reason for reason in reasons)
        # A start after the last failure also covers the failures before it.
        return name in started and started[name] > last[name]

    return [msgspec.structs.replace(failure, recovered=has_recovered(failure)) for failure in all_failures]
