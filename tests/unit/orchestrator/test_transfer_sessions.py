"""Sessions of engines and the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from primeslurm.orchestrator.weight_updates import sessions
from primeslurm.orchestrator.weight_updates.sessions import GATHER_S, OFFER_TIMEOUT_S, NoSenderError, TransferSessions
from primeslurm.wire.link.messages import Answer
from primeslurm.wire.weight_transfer.messages import OfferTransfer, SessionPlace
from tests.support.clock import Clock

HOLD_S = 0.5


class Meeting:
    """A trainer of two ranks, and engines of four workers."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sessions = TransferSessions(workers=4, timeout_s=60, clock=self.clock)
        self.wanting = 0

    async def ask(self, version: int = 1, done: str = "") -> Answer:
        request = OfferTransfer(version, "node:29500", 2, done)
        return await self.sessions.answer(request, lambda: self.wanting, HOLD_S)

    async def come(self, version: int = 1, engine: str = "engine-0") -> asyncio.Task[SessionPlace]:
        """An engine that wants the policy and waits for its place."""
        task = asyncio.create_task(self.sessions.join(version, engine))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


async def test_waiting_engines_share_a_session(meeting: Meeting) -> None:
    meeting.sessions.expect(1)
    meeting.wanting = 2
    engines = [await meeting.come(), await meeting.come()]
    answer = await meeting.ask()
    assert answer.kind == "session" and answer.session is not None
    assert (answer.session.senders, answer.session.size) == (2, 10)
    places = [await engine for engine in engines]
    assert [place.first_rank for place in places] == [2, 6]
    assert {(place.session, place.store) for place in places} == {(answer.session.id, "node:29500")}

    assert await meeting.ask() == answer, "an announcement that was lost is repeated"
    meeting.wanting = 0
    assert (await meeting.ask(done=answer.session.id)).kind == "ok"
    assert not meeting.sessions.sends(1)


async def test_engines_keep_their_ranks_in_whatever_order_they_come(meeting: Meeting) -> None:
    for version, order in ((1, ("b", "a", "c")), (2, ("c", "b", "a"))):
        meeting.sessions.expect(version)
        meeting.wanting = 3
        places = {engine: await meeting.come(version, engine) for engine in order}
        await meeting.ask(version)
        assert {engine: (await place).first_rank for engine, place in places.items()} == {"a": 2, "b": 6, "c": 10}


async def test_session_starts_without_a_late_engine(meeting: Meeting) -> None:
    meeting.wanting = 2
    meeting.sessions.expect(1)
    await meeting.come()
    asking = asyncio.create_task(meeting.ask())
    await asyncio.sleep(0.3)
    assert not asking.done()
    meeting.clock.now += GATHER_S
    answer = await asking
    assert answer.session is not None and answer.session.size == 6

    late = await meeting.come()
    meeting.clock.now += GATHER_S
    again = await meeting.ask(done=answer.session.id)
    assert again.session is not None and again.session.id != answer.session.id
    assert (await late).session == again.session.id


async def test_trainer_waits_while_an_engine_needs_the_policy(meeting: Meeting) -> None:
    meeting.wanting = 1
    asking = asyncio.create_task(meeting.ask())
    await asyncio.sleep(0.3)
    assert not asking.done()
    meeting.clock.now += 2 * HOLD_S
    assert (await asking).kind == "wait"


async def test_trainer_is_answered_when_the_last_engine_is_updated(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "POLL_S", 3600)
    meeting.wanting = 1
    asking = asyncio.create_task(meeting.ask())
    await asyncio.sleep(0)
    meeting.wanting = 0
    await meeting.sessions.look_again()
    assert (await asking).kind == "ok"


async def test_engine_does_not_wait_for_a_busy_trainer(meeting: Meeting) -> None:
    with pytest.raises(NoSenderError, match="version 1"):
        await meeting.sessions.join(1, "engine-0")
    meeting.sessions.expect(1)
    assert meeting.sessions.sends(1) and not meeting.sessions.sends(2)
    with pytest.raises(NoSenderError, match="version 2"):
        await meeting.sessions.join(2, "engine-0")
    meeting.clock.now += OFFER_TIMEOUT_S
    assert not meeting.sessions.sends(1), "it promised to ask, and never did"


@pytest.mark.parametrize("has_withdrawn", [True, False])
async def test_cancelled_engine_has_no_place(meeting: Meeting, has_withdrawn: bool) -> None:
    meeting.sessions.expect(1)
    meeting.wanting = 1
    gone, stays = await meeting.come(), await meeting.come()
    gone.cancel()
    if has_withdrawn:
        await asyncio.gather(gone, return_exceptions=True)
    answer = await meeting.ask()
    assert answer.session is not None and answer.session.size == 6
    assert (await stays).first_rank == 2


@pytest.mark.parametrize("turn", [lambda sessions: sessions.close(), lambda sessions: sessions.expect(2)])
async def test_waiting_engine_is_dismissed_when_the_trainer_stops_sending(
    meeting: Meeting, turn: Callable[[TransferSessions], None]
) -> None:
    meeting.sessions.expect(1)
    waits = await meeting.come()
    turn(meeting.sessions)
    with pytest.raises(NoSenderError, match="version 1"):
        await waits


async def test_session_names_the_engine_that_left(meeting: Meeting) -> None:
    meeting.sessions.expect(1)
    meeting.wanting = 2
    await meeting.come()
    await meeting.come()
    first = (await meeting.ask()).session
    assert first is not None and meeting.sessions.lost_from(first.id) == ""
    meeting.sessions.leave(first.id, "engine-1 is gone")
    meeting.sessions.leave(first.id, "engine-0: it had waited for engine-1")
    assert meeting.sessions.lost_from(first.id) == "engine-1 is gone"

    meeting.wanting = 1
    await meeting.come()
    second = (await meeting.ask(done=first.id)).session
    assert second is not None and second.size == 6
    meeting.sessions.leave(first.id, "the old one again")
    assert meeting.sessions.lost_from(second.id) == meeting.sessions.lost_from(first.id) == ""
