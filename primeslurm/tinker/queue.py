"""The order of one client's requests, and their results."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from primeslurm.tinker.requests import RequestError

log = logging.getLogger(__name__)
# Number of retrieved results that stay available, because an answer may be lost on its way.
RETRIEVED = 1000
# Number of requests of one session. More drop its oldest results, even if no client retrieved them.
PER_SESSION = 10_000

Result = dict[str, object] | bytes
"""A JSON object, or an encoded protobuf message."""
Action = Callable[[], Result]


class InOrder:
    """Releases items in the order of their sequence numbers, however they arrive."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, tuple[Future[Result], Action]] = {}

    def add(self, number: int, item: tuple[Future[Result], Action]) -> list[tuple[Future[Result], Action]]:
        """Add an item, and return the items that can run now. Raises RequestError if the number was released."""
        if number < self._next:
            raise RequestError("seq_id", number, f"is in the past; the next one is {self._next}", 410)
        self._waiting[number] = item
        released = []
        while self._next in self._waiting:
            released.append(self._waiting.pop(self._next))
            self._next += 1
        return released


class Requests:
    """All requests by id, and their results. One thread of `worker` executes them.

    An id starts with its session and a colon. A request that is sent again has the same id, and is not executed again.
    """

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._sessions: dict[str, dict[str, Future[Result]]] = {}
        self._retrieved: deque[str] = deque()

    def submit(self, request_id: str, action: Action, number: int = 0, order: InOrder | None = None) -> None:
        """Execute an action, in the order of its number. Nothing happens if the request is known."""
        futures = self._sessions.setdefault(_session(request_id), {})
        if request_id in futures:
            return
        future: Future[Result] = Future()
        ready = order.add(number, (future, action)) if order else [(future, action)]
        if len(futures) >= PER_SESSION:
            futures.pop(next((name for name, each in futures.items() if each.done()), ""), None)
        futures[request_id] = future
        for item in ready:
            self._worker.submit(_execute, *item)

    def future(self, request_id: str) -> Future[Result]:
        """Return the future of a request. Raises RequestError with status 410 if it is unknown."""
        future = self._sessions.get(_session(request_id), {}).get(request_id)
        if future is None:
            raise RequestError(
                "request_id",
                request_id,
                "is unknown: its session ended, the service restarted, or its result is too old",
                410,
            )
        return future

    def retrieved(self, request_id: str) -> None:
        """Note that a client got a result. Old results are forgotten."""
        self._retrieved.append(request_id)
        if len(self._retrieved) > RETRIEVED:
            oldest = self._retrieved.popleft()
            self._sessions.get(_session(oldest), {}).pop(oldest, None)

    def forget(self, session: str) -> None:
        """Forget the requests of a session. Those that have not started never run."""
        for future in self._sessions.pop(session, {}).values():
            future.cancel()


def _session(request_id: str) -> str:
    return request_id.partition(":")[0]


def _execute(future: Future[Result], action: Action) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except RequestError as error:
        future.set_result({"error": str(error), "category": "user"})
    except Exception as error:  # the service answers, and serves other clients
        log.exception("a request failed")
        future.set_result({"error": f"{type(error).__name__}: {error}", "category": "server"})
