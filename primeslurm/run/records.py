"""Reading what processes append to: metrics.jsonl and events/*.jsonl. The last line may be half a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from primeslurm.records.metrics import by_one_name
from primeslurm.run.directory import Attempt, RunDirectory

TAIL_BYTES = 256 * 1024
NOTABLE_FILES = 24
"""Event files looked at for what happened lately, beside those of the head, the orchestrator and the trainer."""

Row = dict[str, Any]
Event = dict[str, Any]


def rows(run_dir: Path) -> list[Row]:
    """The rows of metrics.jsonl, one per step, in order; those of SFT under the names of RL."""
    return [by_one_name(row) for row in _parse(_read(run_dir / "metrics.jsonl"))]


def recent_rows(path: Path) -> list[Row]:
    """The last complete rows of a metrics.jsonl, as many as fit into 256 KiB; empty if there are none."""
    return [by_one_name(row) for row in _parse(_tail(path, TAIL_BYTES))]


def events(run: RunDirectory) -> list[Event]:
    """The events of all processes of all attempts, in order of time."""
    return in_order(event for attempt in run.attempts() for event in attempt_events(attempt))


def attempt_events(attempt: Attempt) -> list[Event]:
    """The events of all processes of one attempt, in order of time."""
    return in_order(event for path in (attempt.path / "events").glob("*.jsonl") for event in _parse(_read(path)))


def recent_events(attempt: Attempt) -> list[Event]:
    """The newest events, in order of time, without a look at every node's: agents write when something happens."""
    directory = attempt.path / "events"
    always = ("head.jsonl", "orchestrator.jsonl", "trainer-rank-0.jsonl")
    try:
        with os.scandir(directory) as entries:
            others = [(e.stat().st_mtime, e.name) for e in entries if e.name not in always]
    except FileNotFoundError:
        return []
    names = [*always, *(name for _, name in sorted(others)[-NOTABLE_FILES:])]
    return in_order(event for name in names for event in _parse(_tail(directory / name, TAIL_BYTES // 8)))


def in_order(found: Iterable[Event]) -> list[Event]:
    """Events by time; those that carry none are left out."""
    return sorted((event for event in found if isinstance(event.get("time"), int | float)), key=lambda e: e["time"])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _tail(path: Path, size: int) -> bytes:
    """The last `size` bytes from the first whole line on."""
    try:
        with path.open("rb") as handle:
            begin = max(0, handle.seek(0, os.SEEK_END) - size)
            handle.seek(begin)
            data = handle.read()
    except OSError:
        return b""
    return data.partition(b"\n")[2] if begin else data


def _parse(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.split(b"\n")[:-1]:
        try:
            value = json.loads(line)  # and not msgspec: a metric may be NaN
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
