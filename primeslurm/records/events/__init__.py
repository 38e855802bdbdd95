"""All kinds of events, and the decoder of a journal's lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Union

import msgspec

from primeslurm.records.events import evaluation, nodes, policy, processes, training  # noqa: F401
from primeslurm.records.record import Event

# The modules imported above define all kinds of events as subclasses.
KINDS: tuple[type[Event], ...] = tuple(Event.__subclasses__())
_ANY_EVENT: Any = Union[KINDS]  # noqa: UP007  a union of types that are only known at run time
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(_ANY_EVENT)


def decode(line: bytes) -> Event | None:
    """Decode one line of a journal. Return None for a damaged line, and for a kind of event of another release."""
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        return None
    except (ValueError, RecursionError):
        pass
    try:  # Python's json module writes NaN and lone surrogates, which are not JSON
        event: Event = msgspec.convert(json.loads(line), _ANY_EVENT)
    except (ValueError, RecursionError):
        return None
    return event


def in_order(events: Iterable[Event]) -> list[Event]:
    return sorted((event for event in events if event.time), key=lambda event: event.time)
