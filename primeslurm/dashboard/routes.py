"""The addresses of the dashboard: one HTML page, its files, and JSON about runs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from primeslurm.base.errors import RunError
from primeslurm.dashboard import assets, charts, log_page
from primeslurm.dashboard.access import AccessControl
from primeslurm.dashboard.log_page import page_after
from primeslurm.dashboard.rollout_pages import NotValidError, number
from primeslurm.dashboard.run_data import RunData, RunIndex
from primeslurm.dashboard.text import encode
from primeslurm.run.status.run_status import ACTIVE

Endpoint = Callable[[Request], Response]


def application(index: RunIndex, token: str, hosts: Collection[str], cookie: str = "primeslurm") -> Starlette:
    """Return the web app. `token`, `hosts` and `cookie` are those of `AccessControl`."""
    get = functools.partial(_json, index)
    run = "/api/runs/{run}"
    return Starlette(
        routes=[
            Route("/", lambda request: HTMLResponse(assets.page())),
            Mount("/static", StaticFiles(directory=assets.STATIC)),
            Route("/api/runs", get(_runs)),
            Route("/api/live", lambda request: _follow_list(index)),
            Route(f"{run}/status", get(lambda data, request: data.status())),
            Route(f"{run}/curves", get(_curves)),
            Route(f"{run}/fleet", get(lambda data, request: data.fleet())),
            Route(f"{run}/events", get(lambda data, request: data.attempts())),
            Route(f"{run}/logs", get(_logs)),
            Route(f"{run}/log", get(_log)),
            Route(f"{run}/plan", get(lambda data, request: data.plan())),
            Route(f"{run}/processes/{{process}}", get(lambda data, request: data.process(_path(request, "process")))),
            Route(f"{run}/recipe", get(lambda data, request: data.recipe())),
            Route(
                f"{run}/diff/{{other}}", get(lambda data, request: data.difference(index.run(_path(request, "other"))))
            ),
            Route(f"{run}/evaluations", get(lambda data, request: data.evaluations())),
            Route(f"{run}/evaluations/{{step}}/{{label:path}}", get(_examples)),
            Route(f"{run}/rollouts", get(lambda data, request: data.rollouts.page(request.query_params))),
            Route(
                f"{run}/rollouts/{{rollout:path}}",
                get(lambda data, request: data.rollouts.transcript(_path(request, "rollout"))),
            ),
            Route(f"{run}/live", lambda request: _follow_run(index, request)),
            Route(f"{run}/log/live", lambda request: _follow_log(index, request)),
        ],
        middleware=[
            Middleware(AccessControl, token=token, hosts=hosts, cookie=cookie),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3),
        ],
        exception_handlers={
            RunError: _handler(404),
            NotValidError: _handler(400),
            OSError: _handler(503),
        },
    )


def _handler(code: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: _encoded({"error": str(error)}, code)


def _encoded(value: Any, code: int = 200) -> Response:
    return Response(encode(value), code, media_type="application/json")


def _json(index: RunIndex, answer: Callable[..., Any]) -> Endpoint:
    """Return an endpoint that encodes the result of `answer` for the run in the path, or else for the index."""

    def endpoint(request: Request) -> Response:
        name = request.path_params.get("run")
        return _encoded(answer(index if name is None else index.run(name), request))

    return endpoint


def _path(request: Request, name: str) -> str:
    return str(request.path_params[name])


def _number(request: Request, name: str) -> int | None:
    return number(request.query_params, name)


def _runs(index: RunIndex, request: Request) -> dict[str, Any]:
    return {"directory": str(index.root), "runs": index.overviews()}


def _curves(data: RunData, request: Request) -> dict[str, Any]:
    """All charts of a run. Those of the section `Other metrics` have values only with `other=1`."""
    points = min(_number(request, "points") or charts.POINTS, 5000)
    return charts.curves(data.metrics(), other=bool(request.query_params.get("other")), points=points)


def _logs(data: RunData, request: Request) -> dict[str, Any]:
    attempt = data.attempt(_number(request, "attempt"))
    logs = data.log_files(attempt.number)
    return {
        "attempt": attempt.number,
        "attempts": [each.number for each in data.run.attempts()],
        "logs": [{"name": name, "bytes": path.stat().st_size} for name, path in logs.items()],
    }


def _log_path(data: RunData, request: Request) -> Path:
    name = request.query_params.get("name", "")
    # The name is only compared with the names of existing logs, and never part of a path.
    path = data.log_files(_number(request, "attempt")).get(name)
    if path is None:
        raise RunError(f"{data.run.name} has no log {name[:200]}")
    return path


def _log(data: RunData, request: Request) -> dict[str, Any]:
    return log_page.page_before(_log_path(data, request), _number(request, "before"))


def _examples(data: RunData, request: Request) -> list[Any]:
    step = number(request.path_params, "step")
    assert step is not None  # the router admits no empty part of a path
    return data.evaluated_examples(step, _path(request, "label"))


def _follow_list(index: RunIndex) -> Response:
    return event_stream(ListChanges(index).look, lambda: LIST_POLL_S)


def _follow_run(index: RunIndex, request: Request) -> Response:
    run = index.run(_path(request, "run"))
    changes = RunChanges(run, _number(request, "rows"), _number(request, "generation") or 0)
    return event_stream(changes.look, lambda: POLL_S if changes.active else SLOW_POLL_S)


def _follow_log(index: RunIndex, request: Request) -> Response:
    path = _log_path(index.run(_path(request, "run")), request)
    return event_stream(LogChanges(path, _number(request, "begin") or 0).look, lambda: LOG_POLL_S)


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
