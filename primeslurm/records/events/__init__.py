"""All kinds of events, and how they are read back from a journal."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from primeslurm.records.events.evaluation import EvaluationEvent
from primeslurm.records.events.nodes import NodeEvent
from primeslurm.records.events.policy import PolicyEvent
from primeslurm.records.events.processes import ProcessEvent
from primeslurm.records.events.training import TrainingEvent
from primeslurm.records.record import Event

AnyEvent = NodeEvent | ProcessEvent | TrainingEvent | PolicyEvent | EvaluationEvent
"""Every event that this release writes."""
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def decode(line: bytes) -> Event | None:
    """Read one line of a journal.

    Returns:
        The event. None for a kind of another release, and for a line that is damaged or not an event.
    """
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        return None
    except (ValueError, RecursionError):
        return _decode_as_python(line)


def _decode_as_python(line: bytes) -> Event | None:
    """Python writes NaN where JSON has no word for it, and halves of surrogate pairs."""
    try:
        event: AnyEvent = msgspec.convert(json.loads(line), AnyEvent)
    except (ValueError, RecursionError):
        return None
    return event


def in_order(found: Iterable[Event]) -> list[Event]:
    """Sort events by time, and leave out those that carry none."""
    return sorted((event for event in found if event.time), key=lambda event: event.time)
