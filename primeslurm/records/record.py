"""What every event and every state says of itself."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Something that one process wrote down. Its journal fills in who and when."""

    time: float = 0.0
    """Unix seconds; 0 before it is written."""
    process: str = ""
    """Name of the writer: a process of the Plan, `head`, `batch` (the job's script), or `agent-<rank>`."""


class Event(Record, frozen=True, kw_only=True, tag_field="kind"):
    """Something that happened: one line of `events/<process>.jsonl`. `kind` tells the subclasses apart."""
