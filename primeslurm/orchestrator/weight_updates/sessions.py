"""Sessions between the trainer that can send a policy and the engines that need it.

The trainer can send only the newest policy, while it offers it (`OfferTransfer`). Engines that wait then join one
session, in which all trainer ranks send to all their workers. An engine that comes later gets the policy in the next
session: when the trainer has made the next policy, or waits for a batch. If an engine is lost, its session ends for all
members, because they would wait for it. The others ask for another session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from primeslurm.wire.link.messages import Answer
from primeslurm.wire.weight_transfer.messages import OfferTransfer, SessionPlace, TransferSession

GATHER_S = 3.0  # a session starts when every engine that needs the policy has joined, or this long after the first one
# A trainer that has not repeated its offer for this long no longer sends, unless it is busy with a session.
OFFER_TIMEOUT_S = 30.0
POLL_S = 0.2


class NoSenderError(Exception):
    """The trainer does not send this version now."""


@dataclass(eq=False)
class _Waiting:
    """An engine that waits for a session."""

    version: int
    engine: str
    since: float
    place: asyncio.Future[SessionPlace]


class TransferSessions:
    """Forms sessions."""

    def __init__(self, workers: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._clock = clock
        self._version: int | None = None
        self._offered_at = clock()
        self._session: TransferSession | None = None
        self._lost = ""  # which engine the session has lost, and why
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Condition()

    def expect(self, version: int) -> None:
        """Let engines wait for `version`, because the trainer will offer it soon."""
        self._version, self._offered_at, self._session = version, self._clock(), None
        self._dismiss()

    def close(self) -> None:
        """End all waiting, because the trainer does something else now."""
        self._version = self._session = None
        self._dismiss()

    def sends(self, version: int) -> bool:
        offers = self._session is not None or self._clock() - self._offered_at < OFFER_TIMEOUT_S
        return version == self._version and offers

    async def join(self, version: int, engine: str) -> SessionPlace:
        """Wait for a session, and return the engine's place in it. Raise NoSenderError if the trainer does not send."""
        if not self.sends(version):
            raise _no_sender(version)
        waiting = _Waiting(version, engine, self._clock(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        await self.look_again()
        try:
            return await waiting.place
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    async def look_again(self) -> None:
        """Answer a waiting trainer if there is an answer now. Call this after a change of the engines' wishes."""
        async with self._changed:
            self._changed.notify_all()

    def leave(self, session: str, reason: str) -> None:
        """Record that an engine does not take part in its session, and why. Sessions that are over are ignored."""
        if self._session is not None and self._session.id == session:
            self._lost = self._lost or reason

    def lost_from(self, session: str) -> str:
        """Return which engine has left the session and why, or "" if none has or the session is over."""
        current = self._session is not None and self._session.id == session
        return self._lost if current else ""

    async def answer(self, request: OfferTransfer, wanting: Callable[[], int], hold_s: float) -> Answer:
        """Answer the trainer's offer, with "wait" after `hold_s`, which is shorter than the trainer's own timeout."""
        if request.version != self._version:
            self.expect(request.version)
        if self._session is not None and self._session.id == request.done:
            self._session = None
        deadline = self._clock() + hold_s
        while True:
            self._offered_at = self._clock()
            if self._session is None:
                self._session = self._form(request, wanting())
            if self._session is not None:  # a new session, or one whose announcement was lost
                return Answer("session", session=self._session)
            if not wanting():
                self.close()
                return Answer("ok")
            if self._clock() > deadline:
                return Answer("wait")
            # Engines that join or are updated notify this task. Others are lost without notice, so it polls, too.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S), self._changed:
                    await self._changed.wait()

    def _form(self, request: OfferTransfer, wanting: int) -> TransferSession | None:
        # A cancelled engine stays in the list until its task has run.
        waiting = [e for e in self._waiting if e.version == request.version and not e.place.done()]
        if not waiting:
            return None
        if len(waiting) < wanting and self._clock() - waiting[0].since < GATHER_S:
            return None
        # The same engines get the same ranks, in whatever order they come, so that they can keep their process group.
        waiting.sort(key=lambda waits: waits.engine)
        self._lost = ""
        size = request.senders + len(waiting) * self._workers
        session = TransferSession(uuid.uuid4().hex[:12], request.senders, size)
        for index, engine in enumerate(waiting):
            self._waiting.remove(engine)
            engine.place.set_result(
                SessionPlace(
                    version=request.version,
                    store=request.store,
                    session=session.id,
                    senders=session.senders,
                    size=session.size,
                    first_rank=session.senders + index * self._workers,
                    timeout_s=self._timeout_s,
                )
            )
        return session

    def _dismiss(self) -> None:
        # An engine that waits for a version that is no longer sent would wait until it counts as broken.
        for engine in self._waiting:
            if engine.version != self._version and not engine.place.done():
                engine.place.set_exception(_no_sender(engine.version))


def _no_sender(version: int) -> NoSenderError:
    return NoSenderError(f"the trainer does not send version {version} now")
