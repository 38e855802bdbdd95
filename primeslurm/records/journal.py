"""What processes record about themselves: events (append-only, one file per writer) and a current state.

One writer per file: appends of several nodes to one file are not atomic on network file systems.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import Appender, write_json
from primeslurm.records.events.processes import StorageFault
from primeslurm.records.heartbeats import liveness
from primeslurm.records.record import Event, Record
from primeslurm.records.reserve import Reserve

MOST_UNWRITTEN = 1000
"""Events that wait in memory while the disk is full; more are lost, the oldest first."""
R = TypeVar("R", bound=Record)


class Journal:
    """Events and state of one process, under `<attempt>/events/<name>.jsonl` and `<attempt>/state/<name>.json`."""

    def __init__(self, attempt_dir: Path, name: str) -> None:
        self._events = attempt_dir / "events" / f"{name}.jsonl"
        self._state = attempt_dir / "state" / f"{name}.json"
        self._name = name
        self._reserve = Reserve(attempt_dir.parent.parent)
        self._unwritten: list[str] = []
        self._lock = threading.RLock()  # a signal handler of the thread that holds it may write, too
        for path in (self._events, self._state):
            files.make_directory(path.parent)
        self._appender = Appender(self._events)

    @property
    def has_begun(self) -> bool:
        """Tell whether there are events of it already."""
        return files.exists(self._events)

    def note_storage_faults(self) -> None:
        """Write an event of each outage of the shared file system that this process notices from now on."""

        def note(fault: files.Outage) -> None:
            self.write(StorageFault(str(fault.path), fault.error, fault.tries, fault.seconds, fault.recovered))

        files.on_fault = note
        files.on_pause = liveness().heartbeat

    def write(self, event: Event) -> None:
        """Append one event. On a full disk it waits in memory for the next one, or for `flush`."""
        # json, and not msgspec: a loss may be NaN, and the name of a file in an error may be no Unicode.
        line = json.dumps(msgspec.to_builtins(self._signed(event)))
        with self._lock:
            self._unwritten = [*self._unwritten[-MOST_UNWRITTEN:], line]
            self.flush()

    def flush(self) -> None:
        """Append what could not be written before."""
        with self._lock, contextlib.suppress(OSError):
            if self._unwritten:
                self._reserve.spend_on(self._append)
                self._unwritten = []

    def _append(self) -> None:
        self._appender.append("".join(line + "\n" for line in self._unwritten).encode())

    def sync(self) -> None:
        """Have what was written so far on disk: a checkpoint counts only with the events before it. Raises OSError."""
        with self._lock:
            durable.sync_if_there(self._events)

    def state(self, state: Record) -> None:
        """Replace the current state."""
        with contextlib.suppress(OSError):
            self._reserve.spend_on(lambda: write_json(self._state, msgspec.to_builtins(self._signed(state))))

    def _signed(self, record: R) -> R:
        return msgspec.structs.replace(record, time=time.time(), process=self._name)
