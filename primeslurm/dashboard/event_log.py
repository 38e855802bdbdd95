"""Events of a run for people, kept current by reading only new lines."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.base import files
from primeslurm.records.events import decode, in_order
from primeslurm.records.reading import GrowingFile
from primeslurm.records.record import Event
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.status.event_text import notable

# Newest notable events that are kept of each file.
PER_FILE = 2000
# Newest events of an attempt that are shown.
SHOWN = 1000


class EventLog:
    """Notable events of all attempts of a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[GrowingFile, deque[Event]]] = {}

    def attempts(self) -> list[dict[str, Any]]:
        """Return each attempt with its times [Unix s], outcome and events. Raises OSError."""
        with self._lock:
            return [self._attempt(attempt) for attempt in self._run.attempts()]

    def _attempt(self, attempt: Attempt) -> dict[str, Any]:
        events = in_order(
            event for path in files.listing(attempt.path / "events", "*.jsonl") for event in self._new(path)
        )
        texts = notable(events)
        job, end = attempt.job(), attempt.end()
        return {
            "number": attempt.number,
            "job_id": job.job_id if job else "",
            "begin": texts[0].time if texts else job.submitted_at if job else None,
            "end": end.time if end else None,
            "outcome": end.outcome if end else "",
            "reason": end.reason if end else "",
            "events": msgspec.to_builtins(texts[-SHOWN:]),
            "hidden": max(0, len(texts) - SHOWN),
        }

    def _new(self, path: Path) -> deque[Event]:
        file, events = self._files.setdefault(path, (GrowingFile(path), deque(maxlen=PER_FILE)))
        complete = False
        while not complete:
            lines, replaced, complete = file.appended()
            if replaced:
                events.clear()
            decoded = (decode(line) for line in lines)
            events.extend(event for event in decoded if event is not None and notable([event]))
        return events
