"""The order of requests, and their results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from primeslurm.tinker.fair_queue import FairQueue
from primeslurm.tinker.requests import RequestError

log = logging.getLogger(__name__)
# Number of retrieved results that stay available, because an answer may be lost on its way.
RETRIEVED = 1000
# Number of requests of one session. More drop its oldest results, even if no client retrieved them.
PER_SESSION = 10_000
# Cost of an optimizer step, a checkpoint or another action of unknown size, in tokens of a pass.
ACTION_COST = 1000.0

Result = dict[str, object] | bytes
"""A JSON object, or an encoded protobuf message."""
Action = Callable[[], Result]


@dataclass(frozen=True)
class Shared:
    """Work that can be executed together with that of other clients."""

    work: Any


class Sharing(Protocol):
    """How to execute shared work."""

    def fits(self, works: Sequence[Any]) -> bool:
        """Return whether works can be executed together."""

    def cost(self, work: Any) -> float:
        """Return the number of tokens of a work."""

    def execute(self, works: Sequence[Any]) -> list[Action]:
        """Execute works. Return for each an action that returns its result, or raises its error."""


_Item = tuple[Future[Result], Action | Shared, float]
"""The future result of a request, its work, and the cost of the work."""


class InOrder:
    """Releases items in the order of their sequence numbers, however they arrive."""

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, _Item] = {}

    def add(self, number: int, item: _Item) -> list[_Item]:
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

    An id is that of a client, a colon and a number, and a client's id starts with its session and a colon. A request
    that is sent again has the same id, and is not executed again. Users share the worker by cost, and the clients of a
    user take turns. If the next request is shared work, it is executed together with the shared work that is next of
    other clients, as far as that fits. `user_of` returns the user of a session, and `weight` the weight of a user.
    """

    def __init__(
        self,
        worker: Executor,
        sharing: Sharing,
        user_of: Callable[[str], str] = lambda session: session,
        weight: Callable[[str], float] = lambda user: 1.0,
    ) -> None:
        self._worker, self._sharing, self._user_of = worker, sharing, user_of
        self._lock = threading.Lock()
        self._waiting = FairQueue[_Item](weight)
        self._sessions: dict[str, dict[str, Future[Result]]] = {}
        self._retrieved: dict[str, None] = {}
        """Ids of retrieved results. The oldest one comes first."""

    def submit(
        self,
        request_id: str,
        action: Action | Shared,
        number: int = 0,
        order: InOrder | None = None,
        cost: float = ACTION_COST,
    ) -> None:
        """Execute an action, in the order of its number. Nothing happens if the request is known.

        `cost` is that of an action in tokens. Shared work has its own.
        """
        if request_id in self._sessions.get(_session(request_id), {}):
            return
        future: Future[Result] = Future()
        item = (future, action, self._sharing.cost(action.work) if isinstance(action, Shared) else cost)
        ready = order.add(number, item) if order else [item]
        self._remember(request_id, future)
        with self._lock:
            for item in ready:
                self._waiting.add(self._user_of(_session(request_id)), request_id.rpartition(":")[0], item)
        for _ in ready:
            self._worker.submit(self._execute_next)

    def start(self, request_id: str, begin: Callable[[], Future[Result]]) -> None:
        """Begin work that needs neither the worker nor an order. Nothing happens if the request is known."""
        if request_id not in self._sessions.get(_session(request_id), {}):
            self._remember(request_id, begin())

    def _remember(self, request_id: str, future: Future[Result]) -> None:
        futures = self._sessions.setdefault(_session(request_id), {})
        if len(futures) >= PER_SESSION:
            futures.pop(next((name for name, each in futures.items() if each.done()), ""), None)
        futures[request_id] = future

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
        self._retrieved.setdefault(request_id)
        if len(self._retrieved) > RETRIEVED:
            oldest = next(iter(self._retrieved))
            del self._retrieved[oldest]
            self._sessions.get(_session(oldest), {}).pop(oldest, None)

    def forget(self, session: str) -> None:
        """Forget the requests of a session. Those that wait for the worker never run, and others are cancelled."""
        for future in self._sessions.pop(session, {}).values():
            future.cancel()

    def _execute_next(self) -> None:
        """Execute the request whose turn it is, if any, and others with it. This runs at least once per request."""
        items = self._take()
        works = [action.work for _, action, _ in items if isinstance(action, Shared)]
        actions = [action for _, action, _ in items if not isinstance(action, Shared)]
        if works:
            try:
                actions = self._sharing.execute(works)
            except Exception as error:
                actions = [partial(fail, error) for _ in works]
        for (future, *_), action in zip(items, actions, strict=True):
            _execute(future, action)

    def _take(self) -> list[_Item]:
        """Take the requests to execute next: one, or shared work that fits together."""
        taken: list[_Item] = []

        def accept(item: _Item) -> float | None:
            future, _, cost = item
            works = [action.work for _, action, _ in [*taken, item] if isinstance(action, Shared)]
            if taken and (len(works) <= len(taken) or not self._sharing.fits(works)):
                return None
            if not future.set_running_or_notify_cancel():
                return 0.0
            taken.append(item)
            return cost

        with self._lock:
            self._waiting.take(accept)
        return taken


def fail(error: Exception) -> Result:
    """Raise an error. This is the action of a request that cannot be executed."""
    raise error


def _session(request_id: str) -> str:
    return request_id.partition(":")[0]


def _execute(future: Future[Result], action: Action) -> None:
    try:
        future.set_result(action())
    except Exception as error:  # the service answers, and serves other clients
        future.set_result(_failure(error))


async def settled(work: Awaitable[Result]) -> Result:
    """Return the result of work. Its error is a result, too."""
    try:
        return await work
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Result:
    if isinstance(error, RequestError):
        return {"error": str(error), "category": "user"}
    log.error("a request failed", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
