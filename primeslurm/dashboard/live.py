"""Server-sent events with the changes since the last look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from primeslurm.base.errors import RunError
from primeslurm.dashboard.log_page import page_after
from primeslurm.dashboard.run_data import RunData, RunIndex
from primeslurm.dashboard.text import encode
from primeslurm.run.status.run_status import ACTIVE

# Seconds between two looks at an active run.
POLL_S = 3.0
# The same for a run that has ended.
SLOW_POLL_S = 10.0
LIST_POLL_S = 5.0
LOG_POLL_S = 0.7
# If more rows are new, the browser loads all charts again.
MOST_ROWS = 200

# Name and data of an event.
Change = tuple[str, Any]


class RunChanges:
    """Changes of one run, for one browser.

    The browser has the first `rows` rows of metrics, which belong to `generation` of the run's `MetricTable`. `rows` is
    None for a browser that shows no curves.
    """

    def __init__(self, run: RunData, rows: int | None, generation: int) -> None:
        self._run, self._rows, self._generation = run, rows, generation
        self._status: bytes = b""
        self.active = True

    def look(self) -> Iterator[Change]:
        """Yield the changes since the last call."""
        try:
            status = self._run.status()
            table = self._run.metrics()
        except RunError as error:
            yield "problem", str(error)
            return
        self.active = status["phase"] in ACTIVE
        encoded = encode({**status, "elapsed_s": None, "eta_s": None})
        if encoded != self._status:
            self._status = encoded
            yield "status", status
        if self._rows is None:
            return
        with table.lock:
            rows, generation = table.trained.rows, table.generation
            if generation != self._generation or rows - self._rows > MOST_ROWS:
                yield "reset", {}
            elif rows > self._rows:
                yield "rows", {"begin": self._rows, "rows": table.rows(self._rows)}
            self._rows, self._generation = rows, generation


class ListChanges:
    """Changes of the list of runs, for one browser."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._seen: dict[str, bytes] = {}

    def look(self) -> Iterator[Change]:
        """Yield the runs that have changed since the last call, and the names of all runs if these have changed."""
        overviews = {each.run: each for each in self._index.overviews()}
        encoded = {name: encode(each) for name, each in overviews.items()}
        changed = [overviews[name] for name in encoded if encoded[name] != self._seen.get(name)]
        if changed or encoded.keys() != self._seen.keys():
            yield "runs", {"changed": changed, "names": list(overviews)}
        self._seen = encoded


class LogChanges:
    """New lines of a log, for one browser."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path, self._begin = path, begin

    def look(self) -> Iterator[Change]:
        """Yield the lines that were written since the last call."""
        page = page_after(self._path, self._begin)
        if page["end"] != self._begin:
            yield "lines", page
        self._begin = page["end"]


def event_stream(look: Callable[[], Iterator[Change]], poll_s: Callable[[], float]) -> StreamingResponse:
    """Return an endless response with the changes that `look` yields, called every `poll_s` seconds in a thread."""
    return StreamingResponse(_events(look, poll_s), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _events(look: Callable[[], Iterator[Change]], poll_s: Callable[[], float]) -> AsyncIterator[bytes]:
    while True:
        try:
            changes = await run_in_threadpool(lambda: list(look()))
        except OSError as error:  # the file system does not answer, or a log was removed
            changes = [("problem", str(error))]
        for name, data in changes:
            yield b"event: %s\ndata: %s\n\n" % (name.encode(), encode(data))
        yield b": alive\n\n"  # fails once the browser has closed the connection
        await asyncio.sleep(poll_s())
