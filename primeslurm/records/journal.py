"""What processes record about themselves: events (append-only, one file per writer) and a current state.

One writer per file: appends of several nodes to one file are not atomic on network file systems.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from primeslurm import durable
from primeslurm.files import write_json
from primeslurm.records.base import Event, Record

R = TypeVar("R", bound=Record)


class Journal:
    """Events and state of one process, under `<attempt>/events/<name>.jsonl` and `<attempt>/state/<name>.json`."""

    def __init__(self, attempt_dir: Path, name: str) -> None:
        self._events = attempt_dir / "events" / f"{name}.jsonl"
        self._state = attempt_dir / "state" / f"{name}.json"
        self._name = name
        for path in (self._events, self._state):
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: Event) -> None:
        """Append one event. A full disk loses the event, never the process."""
        # json, and not msgspec: a loss may be NaN, and the name of a file in an error may be no Unicode.
        line = json.dumps(msgspec.to_builtins(self._signed(event)))
        with contextlib.suppress(OSError), self._events.open("a") as handle:
            handle.write(line + "\n")

    def sync(self) -> None:
        """Have what was written so far on disk: a checkpoint counts only with the events before it. Raises OSError."""
        durable.sync_if_there(self._events)

    def state(self, state: Record) -> None:
        """Replace the current state."""
        with contextlib.suppress(OSError):
            write_json(self._state, msgspec.to_builtins(self._signed(state)))

    def _signed(self, record: R) -> R:
        return msgspec.structs.replace(record, time=time.time(), process=self._name)
