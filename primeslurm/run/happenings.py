"""Which events a person wants to know of, in words. Everything else in the journals is for machines."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from primeslurm.run.records import Event

Level = Literal["info", "warning", "error"]
DIED = ("backoff", "fallen", "failed")
"""States of a process that ended although it should not have."""


class Happening(msgspec.Struct, frozen=True):
    """Something worth telling."""

    time: float
    """Unix seconds."""
    who: str
    """The process that it happened to, or that did it."""
    text: str
    level: Level = "info"


def notable(events: Iterable[Event]) -> list[Happening]:
    """The events worth telling, in the order given; what happens several times in a row is told once."""
    told: list[Happening] = []
    times = 1
    for event in events:
        words = _WORDS.get(event.get("kind", ""))
        happening = words(event) if words else None
        if happening is None:
            continue
        if told and (told[-1].who, _once(told[-1])) == (happening.who, happening.text):
            times += 1
            told[-1] = msgspec.structs.replace(happening, text=f"{happening.text} ({times} times)")
        else:
            times = 1
            told.append(happening)
    return told


def lately(happenings: Sequence[Happening], count: int) -> list[Happening]:
    """The newest happenings, each text only where it happened last."""
    newest = {(happening.who, _once(happening)): happening for happening in happenings}
    return sorted(newest.values(), key=lambda happening: happening.time)[-count:]


def _once(happening: Happening) -> str:
    return re.sub(r" \(\d+ times\)$", "", happening.text)


def exit_words(code: int | None) -> str:
    """How a process ended: its exit code, or the name of the signal."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _exited(event: Event) -> Happening | None:
    state, code = event.get("state"), event.get("code")
    if state not in DIED:
        return None  # it had done its work, or the attempt was ending anyway
    again = {"backoff": "; it is started again", "fallen": "; its unit is started again"}.get(state, "")
    text = exit_words(code) + _because(event.get("reason")) + again
    return Happening(event["time"], event["name"], text, "warning" if again else "error")


def _started(event: Event) -> Happening | None:
    if not event.get("restarts"):
        return None
    return Happening(event["time"], event["name"], f"started again (restart {event['restarts']})")


def _ending(event: Event) -> Happening | None:
    if event.get("process") not in ("head", "batch"):
        return None  # every agent repeats it
    level: Level = "error" if event.get("outcome") == "failed" else "info"
    return Happening(
        event["time"], event["process"], f"ends the attempt as {event['outcome']}: {event['reason']}", level
    )


def _ended(event: Event) -> Happening:
    next_ = "requeued" if event.get("requeued") else "not requeued" + _because(event.get("why_not"))
    return Happening(event["time"], "head", f"attempt {event.get('outcome')}, {next_}")


def _committed(event: Event) -> Happening | None:
    if event.get("process") != "trainer-rank-0":
        return None
    return Happening(event["time"], "trainer", f"committed step {event.get('step')}")


def _seated(event: Event) -> Happening | None:
    if event.get("process") != "head":
        return None  # every agent tells its own seat
    spares = f", {len(event['spares'])} more are spares" if event.get("spares") else ""
    return Happening(event["time"], "head", f"all {len(event.get('nodes', []))} nodes are there{spares}")


def _given_up(event: Event) -> Happening:
    names = event.get("processes", [])
    few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Happening(event["time"], "head", f"goes on without {few}{_because(event.get('reason'))}", "error")


def _preflight(event: Event) -> Happening | None:
    if event.get("fitness") != "unfit":
        return None
    return _of_node(event, f"is not fit{_because(_failed(event))}", "error")


def _of_node(event: Event, text: str, level: Level = "info") -> Happening:
    return Happening(event["time"], f"node {event.get('node')}", text, level)


def _failed(event: Event) -> str:
    return "; ".join(check["text"] for check in event.get("checks", []) if check.get("level") == "failed")


def _because(text: object) -> str:
    return f": {text}" if text else ""


def _error(who: str, text: str, field: str = "error", level: Level = "error") -> Callable[[Event], Happening]:
    """Words for events that carry the name of a component and an error."""

    def tell(event: Event) -> Happening:
        return Happening(
            event["time"], str(event.get(who) or event.get("process", "")), text + _because(event.get(field)), level
        )

    return tell


_WORDS: dict[str, Callable[[Event], Happening | None]] = {
    "seated": _seated,
    "preflight": _preflight,
    "gpu_failed": lambda e: _of_node(e, f"a GPU failed{_because(_failed(e))}", "error"),
    "node_lost": lambda e: Happening(
        e["time"], f"node {e.get('node')}", f"is lost{_because(e.get('reason'))}", "warning"
    ),
    "launched_again": lambda e: Happening(
        e["time"], "batch", f"starts all agents again without {', '.join(e.get('without', []))}", "warning"
    ),
    "node_replaced": lambda e: Happening(e["time"], f"node {e.get('node')}", f"is replaced by {e.get('by')}"),
    "given_up": _given_up,
    "unit_restart": _error("unit", "is started again as one", "reason", "warning"),
    "replica_lost": _error("router", "is given up with its replica", level="warning"),
    "started": _started,
    "exited": _exited,
    "start_failed": _error("name", "cannot be started"),
    "agent_failed": _error("process", "the agent failed"),
    "head_failed": _error("process", "the head failed"),
    "heartbeat_failed": _error("process", "cannot write its heartbeat", level="warning"),
    "publish_failed": _error("process", "cannot write fleet.json", level="warning"),
    "engine_update_failed": _error("engine", "did not take a policy", level="warning"),
    "engine_restart": _error("engine", "is restarted: it failed an update", level="warning"),
    "rollout_failed": _error("process", "a rollout failed", level="warning"),
    "stall": _error("suspect", "nothing moves: the suspect"),
    "committed": _committed,
    "ending": _ending,
    "ended": _ended,
}
