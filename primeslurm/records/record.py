"""Base classes of what a process writes into its journal."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record of one process. Its journal fills in time and writer."""

    time: float = 0.0  # Unix seconds; 0 before it is written
    process: str = ""  # a process of the Plan, `head`, `batch` (the job's script) or `agent-<rank>`


class Event(Record, frozen=True, kw_only=True, tag_field="kind"):
    """One line of `events/<process>.jsonl`. `kind` distinguishes the subclasses."""
