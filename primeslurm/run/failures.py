"""From the events of an attempt to its failures: what, where, when, how, and whether the run got over it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from primeslurm.run.happenings import DIED, exit_words
from primeslurm.run.records import Event
from primeslurm.wire import exits

SILENT_S = 20.0
"""A node whose heartbeat stopped so long before the attempt ended was not simply the first to end."""
_SILENCE = re.compile(r"silent for (\d+) s")


class Failure(msgspec.Struct, frozen=True):
    """One thing that failed."""

    time: float
    """Unix seconds."""
    component: str
    """A process, an agent, or a node."""
    node: str
    """Name of its node; empty if unknown."""
    how: str
    code: int | None = None
    """Exit code; negative: by that signal."""
    recovered: bool = False
    """It was started again, and worked."""


def failures(events: Sequence[Event], heartbeats: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """All failures of an attempt, in order of time.

    Args:
        events: of all processes of the attempt, in order of time.
        heartbeats: the last one of every node.
    """
    hosts = {event["process"]: event.get("node", "") for event in events if event.get("kind") == "agent_started"}
    found = [failure for event in events if (failure := _of_event(event, hosts)) is not None]
    found += _lost_nodes(events, heartbeats)
    found += _unexplained_end(events, found)
    return _with_recovery(sorted(found, key=lambda failure: failure.time), events)


def _of_event(event: Event, hosts: Mapping[str, str]) -> Failure | None:
    kind, at, by = event.get("kind"), event["time"], event.get("process", "")
    host = hosts.get(by, "")
    if kind == "exited" and event.get("state") in DIED and event.get("code") != exits.CHECKPOINTED:
        why = f" ({event['reason']})" if event.get("reason") else ""
        return Failure(at, event["name"], host, exit_words(event.get("code")) + why, event.get("code"))
    if kind == "node_lost":
        return Failure(at - _silence(event["reason"]), f"node {event['node']}", event["node"], event["reason"])
    if kind == "start_failed":
        return Failure(at, event["name"], host, f"cannot be started: {event.get('error')}")
    if kind in ("agent_failed", "head_failed"):
        return Failure(at, by, host, f"failed: {event.get('error')}")
    if kind == "engine_update_failed":
        return Failure(at, event["engine"], "", f"did not take a policy: {event.get('error')}")
    if kind == "stall":
        why = event.get("error") or f"no finished rollout and no new policy for {event.get('seconds')} s"
        return Failure(at, str(event.get("suspect")), "", f"nothing moves: {why}")
    return None


def _lost_nodes(events: Sequence[Event], heartbeats: Iterable[Mapping[str, Any]]) -> list[Failure]:
    """Nodes that fell silent before the attempt ended, whoever noticed."""
    over = next((event["time"] for event in events if event.get("kind") == "ending"), None)
    if over is None:
        return []
    told = {event.get("node") for event in events if event.get("kind") == "node_lost"}
    beats = [beat for beat in heartbeats if not beat.get("ended") and beat["name"] not in told]
    silent = [beat for beat in beats if beat["time"] < over - SILENT_S]
    words = "last heartbeat {:.0f} s before the end"
    return [Failure(b["time"], f"node {b['name']}", b["name"], words.format(over - b["time"])) for b in silent]


def _unexplained_end(events: Sequence[Event], known: Sequence[Failure]) -> list[Failure]:
    """What the head ended the attempt for, if no event of anybody else tells of it."""
    ending = next((e for e in events if e.get("kind") == "ending" and e.get("process") == "head"), None)
    if ending is None or ending.get("outcome") != "failed":
        return []
    suspect = ending.get("suspect") or "head"
    if any(suspect in (failure.component, failure.node) for failure in known):
        return []
    return [Failure(ending["time"] - _silence(ending["reason"]), suspect, "", ending["reason"])]


def _silence(reason: str) -> float:
    """Seconds for which a node had been silent already when it was given up."""
    found = _SILENCE.search(reason)
    return float(found[1]) if found else 0.0


def _with_recovery(found: list[Failure], events: Sequence[Event]) -> list[Failure]:
    started: dict[str, float] = {}
    for event in events:
        if event.get("kind") == "started":
            started[event["name"]] = event["time"]
    last = {failure.component: failure.time for failure in found}
    lost = {f"node {event['node']}" for event in events if event.get("kind") == "node_lost"}
    harm = [str(event.get("reason")) for event in events if event.get("kind") in ("given_up", "ending")]

    def over(failure: Failure) -> bool:
        name = failure.component
        if name in lost:
            # A spare took its place, or it was a spare itself: nothing was given up for it.
            return not any(f"{name}:" in reason for reason in harm)
        # Started after its last failure: the failures before that were got over as well.
        return name in started and started[name] > last[name]

    return [msgspec.structs.replace(failure, recovered=over(failure)) for failure in found]
