"""Journal of one process: its events, one file per process to append to, and its current state.

Every file has one writer, because appends from several nodes to one file are not atomic on network file systems.
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

# Events kept in memory while they cannot be written. Older ones are dropped.
MAX_UNWRITTEN = 1000
R = TypeVar("R", bound=Record)


class Journal:
    """Writes `<attempt>/events/<name>.jsonl` and `<attempt>/state/<name>.json`."""

    def __init__(self, attempt_dir: Path, name: str) -> None:
        self._events = attempt_dir / "events" / f"{name}.jsonl"
        self._state = attempt_dir / "state" / f"{name}.json"
        self._name = name
        self._unwritten: list[str] = []
        self._lock = threading.RLock()  # reentrant: a signal handler may write while its own thread holds the lock
        for path in (self._events, self._state):
            files.make_directory(path.parent)
        self._appender = Appender(self._events)

    @property
    def has_begun(self) -> bool:
        return files.exists(self._events)

    def note_storage_faults(self) -> None:
        """From now on, write an event for each outage of the shared file system that this process notices."""

        def note(fault: files.Outage) -> None:
            self.write(StorageFault(str(fault.path), fault.error, fault.tries, fault.seconds, fault.recovered))

        files.on_fault = note
        files.on_pause = liveness().heartbeat

    def write(self, event: Event) -> None:
        """Append an event. If that fails, the event stays in memory until the next `write` or `flush`."""
        # The json module, not msgspec: a loss may be NaN, and a file name in an error text need not be valid Unicode.
        line = json.dumps(msgspec.to_builtins(self._signed(event)))
        with self._lock:
            self._unwritten = [*self._unwritten[-MAX_UNWRITTEN:], line]
            self.flush()

    def flush(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._unwritten:
                self._appender.append("".join(line + "\n" for line in self._unwritten).encode())
                self._unwritten = []

    def sync(self) -> None:
        """Flush all events to disk: a checkpoint is only valid with the events before it. Raises OSError."""
        with self._lock:
            durable.sync_if_there(self._events)

    def state(self, state: Record) -> None:
        """Replace the current state. A failure is ignored, as the next state follows soon."""
        with contextlib.suppress(OSError):
            write_json(self._state, msgspec.to_builtins(self._signed(state)))

    def _signed(self, record: R) -> R:
        return msgspec.structs.replace(record, time=time.time(), process=self._name)
