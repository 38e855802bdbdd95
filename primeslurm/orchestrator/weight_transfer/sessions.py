"""Brings engines that want a policy and the trainer that can send it into one session.

The trainer can only send between steps, while it offers one (`OfferTransfer`). Engines that wait then are put into one
session, in which all trainer ranks send to all their workers. What an engine that comes later misses, it gets in the
next session: when the trainer has made the next policy, or waits for a batch. An engine that is lost leaves its
session, which then ends for all: they would wait for it. The others ask for another one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from primeslurm.wire.link.messages import Answer
from primeslurm.wire.weight_transfer.messages import OfferTransfer, SessionPlace, TransferSession

GATHER_S = 3.0
"""A session begins when every engine that wants the policy is there, or this long after the first one came."""
PATIENCE_S = 30.0
"""A trainer that has not asked for this long does not send any more, unless it is busy with a session."""


class NoSenderError(Exception):
    """The trainer does not send this version now."""


@dataclass(eq=False)
class _Waiting:
    """An engine that waits for a session."""

    version: int
    since: float
    place: asyncio.Future[SessionPlace]


class TransferSessions:
    """Forms sessions.

    Args:
        workers: how many workers an engine has.
        timeout_s: longest wait for anything within a session.
    """

    def __init__(self, workers: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._clock = clock
        self._version: int | None = None
        self._asked = clock()
        self._session: TransferSession | None = None
        self._lost = ""
        """Which engine of the session is gone, and why."""
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Condition()

    def expect(self, version: int) -> None:
        """Prepare for the trainer to send `version`, as it is about to."""
        self._version, self._asked, self._session = version, self._clock(), None
        self._dismiss()

    def close(self) -> None:
        """End all waiting: the trainer does something else now."""
        self._version = self._session = None
        self._dismiss()

    def sends(self, version: int) -> bool:
        """Tell whether the trainer sends `version` now."""
        asking = self._session is not None or self._clock() - self._asked < PATIENCE_S
        return version == self._version and asking

    async def join(self, version: int) -> SessionPlace:
        """Wait for a session, as an engine: what its workers are told to take part in it.

        Raises:
            NoSenderError: the trainer does not send `version` now, or not any more.
        """
        if not self.sends(version):
            raise _no_sender(version)
        waiting = _Waiting(version, self._clock(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        await self._notify()
        try:
            return await waiting.place
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def leave(self, session: str, reason: str) -> None:
        """Take an engine out of the session that it was to take part in.

        Args:
            session: its id; of one that is over, nothing is to be done.
            reason: which engine it is, and why it does not come, or stay.
        """
        if self._session is not None and self._session.id == session:
            self._lost = self._lost or reason

    def lost_from(self, session: str) -> str:
        """Say which engine has left the session, and why; "" if none has, or if the session is over."""
        current = self._session is not None and self._session.id == session
        return self._lost if current else ""

    async def answer(self, request: OfferTransfer, wanting: Callable[[], int], hold_s: float) -> Answer:
        """Answer the trainer, within `hold_s`.

        Args:
            request: the trainer's offer.
            wanting: how many engines still want the policy.
            hold_s: longest time until the answer "wait"; shorter than the trainer's own patience.
        """
        if request.version != self._version:
            self.expect(request.version)
        if self._session is not None and self._session.id == request.done:
            self._session = None
        deadline = self._clock() + hold_s
        while True:
            self._asked = self._clock()
            if self._session is None:
                self._session = self._form(request, wanting())
            if self._session is not None:  # a new one, or one whose announcement was lost
                return Answer("session", session=self._session)
            if not wanting():
                self.close()
                return Answer("ok")
            if self._clock() > deadline:
                return Answer("wait")
            await self._wait(0.2)

    def _form(self, request: OfferTransfer, wanting: int) -> TransferSession | None:
        # One that is being cancelled is not off the list yet.
        waiting = [e for e in self._waiting if e.version == request.version and not e.place.done()]
        if not waiting:
            return None
        if len(waiting) < wanting and self._clock() - waiting[0].since < GATHER_S:
            return None
        self._lost = ""
        session = TransferSession(
            uuid.uuid4().hex[:12], request.senders, request.senders + len(waiting) * self._workers
        )
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
        """Who waits for what is no longer sent would wait until it is taken for broken."""
        for engine in self._waiting:
            if engine.version != self._version and not engine.place.done():
                engine.place.set_exception(_no_sender(engine.version))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, longest_s: float) -> None:
        """Until an engine came, or a while: engines also stop wanting without a word."""
        try:
            async with asyncio.timeout(longest_s), self._changed:
                await self._changed.wait()
        except TimeoutError:
            return


def _no_sender(version: int) -> NoSenderError:
    return NoSenderError(f"the trainer does not send version {version} now")
