"""Looks at engines under starvation: how long they are waited for, who is blamed, and how many there are a second."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from primeslurm.orchestrator.weight_transfer import engine_client
from primeslurm.orchestrator.weight_transfer.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUnresponsiveError,
    EventLoopDelayedError,
    PolicyVersion,
)
from primeslurm.orchestrator.weight_transfer.engine_pool import EnginePool
from primeslurm.orchestrator.weight_transfer.polling import (
    LEAST_S,
    MOST_S,
    TICK_S,
    UNRESPONSIVE_S,
    AnswerTime,
    EventLoopDelay,
    RateLimiter,
)
from primeslurm.orchestrator.weight_transfer.weight_update_loop import WeightUpdateLoop
from primeslurm.records.journal import Journal
from primeslurm.wire.weight_transfer.messages import EngineStatus

STATUS = {"version": 1, "incarnation": "a", "paused": False, "updates": 1, "initialized": True}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_follows_what_was_seen_as_in_tcp() -> None:
    wait = AnswerTime()
    assert wait.timeout_s == LEAST_S
    for _ in range(50):
        wait.answered(0.01)
    assert wait.timeout_s == LEAST_S, "never less"
    for _ in range(50):
        wait.answered(8.0)
    assert 8.0 < wait.timeout_s < 12.0
    wait.answered(20.0)
    assert 14.0 < wait.timeout_s < 40.0
    for _ in range(30):
        wait.missed()
    assert wait.timeout_s == MOST_S, "never more"


def test_the_first_answers_of_rfc_6298() -> None:
    wait = AnswerTime(least_s=0.0)
    wait.answered(4.0)
    assert wait.timeout_s == pytest.approx(4.0 + 4 * 2.0)
    wait.answered(8.0)
    assert wait.timeout_s == pytest.approx(4.5 + 4 * (0.75 * 2.0 + 0.25 * 4.0))
    wait.missed()
    assert wait.timeout_s == pytest.approx(2 * (4.5 + 4 * 2.5))


def test_a_stall_is_counted_while_it_lasts_and_told_once() -> None:
    clock, told = Clock(), []
    delay = EventLoopDelay(told.append, clock=clock)
    delay.turn()
    clock.now += TICK_S
    assert delay.seconds() == 0.0
    clock.now += 7.0
    assert delay.seconds() == pytest.approx(7.0)
    delay.turn()
    delay.turn()
    assert delay.seconds() == pytest.approx(7.0) and told == [pytest.approx(7.0)]


def test_turns_are_spread_whoever_takes_them() -> None:
    clock = Clock()
    pace = RateLimiter(10.0, clock)
    assert [pace.wait_s() for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    clock.now += 5.0
    assert pace.wait_s() == 0.0, "turns that nobody took are not handed out later"


@pytest.fixture
def pool() -> EnginePool:
    found = EnginePool(["a", "b"], Clock())
    found.want(PolicyVersion(1, "/v1"))
    found.updated("a", 1)
    found.updated("b", 1)
    return found


def test_an_updated_engine_that_is_slow_to_answer_stays_current(pool: EnginePool) -> None:
    assert pool.missed("a", "no answer within 5 s") and not pool.missed("a", "no answer within 10 s")
    assert pool.state("a") == "CURRENT" and pool.silent == 1
    pool.seen("a", EngineStatus(**STATUS))
    assert pool.silent == 0 and pool.report()["a"].error is None


def test_one_that_is_silent_for_long_is_down_and_its_record_says_why(pool: EnginePool) -> None:
    clock = pool._clock
    assert isinstance(clock, Clock)
    clock.now += UNRESPONSIVE_S + 1
    pool.missed("a", "no answer within 5 s")
    assert pool.state("a") == "CURRENT", "it is asked twice"
    pool.missed("a", "no answer within 10 s")
    assert pool.state("a") == "DOWN" and pool.current_version == 1
    assert pool.report()["a"].error == "silent for 31 s: no answer within 10 s"
    pool.want(PolicyVersion(2, "/v2"))
    pool.updated("b", 2)
    assert pool.current_version == 2, "it holds up nobody"


def test_time_in_which_the_orchestrator_stood_still_is_nobodys_silence(pool: EnginePool) -> None:
    clock = pool._clock
    assert isinstance(clock, Clock)
    clock.now += 100
    pool.held_up(100)
    pool.missed("a", "x")
    pool.missed("a", "x")
    assert pool.state("a") == "CURRENT"


Answer = Callable[[httpx.Request], httpx.Response]


def clients(monkeypatch: pytest.MonkeyPatch, answer: Answer, **options: float) -> EngineClient:
    def client(*_: object, **__: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(engine_client, "internal_client", client)
    return EngineClient(lambda: "http://engine", "/model", **options)  # type: ignore[arg-type]


async def test_who_does_not_answer_is_told_from_who_is_gone_and_from_an_own_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    control = clients(monkeypatch, silent)
    for seconds in (5, 10, 20, 40, 60, 60):
        with pytest.raises(EngineUnresponsiveError, match=f"no answer within {seconds}.0 s"):
            await control.status()
    stood = iter([0.0, 30.0])
    with pytest.raises(EventLoopDelayedError, match=r"30\.0 s of 60\.0 s"):
        await control.status(lambda: next(stood))

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineDownError, match="refused") as error:
        await clients(monkeypatch, gone).status()
    assert not isinstance(error.value, EngineUnresponsiveError)


class Machine:
    """Engines of one machine that answers, or has no time to."""

    def __init__(self) -> None:
        self.starved = False
        self.looks = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.looks += 1
        if self.starved:
            raise httpx.ReadTimeout("")
        return httpx.Response(200, json=STATUS)


@asynccontextmanager
async def running(loop: WeightUpdateLoop) -> AsyncIterator[WeightUpdateLoop]:
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.wait({task})


async def settled(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return condition()


async def test_starved_engines_that_have_the_policy_are_not_down_and_it_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine()
    engines = {f"e{i}": clients(monkeypatch, machine) for i in range(6)}
    loop = WeightUpdateLoop(engines, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05)
    async with running(loop):
        await loop.want(PolicyVersion(1, "/v1"))
        await loop.wait_for(1, timeout_s=60)
        assert await settled(lambda: all(loop.pool.state(name) == "CURRENT" for name in engines))
        machine.starved, before = True, machine.looks
        assert await settled(lambda: machine.looks > before + 24)
        assert {loop.pool.state(name) for name in engines} == {"CURRENT"}
        machine.starved = False
        assert await settled(lambda: loop.pool.silent == 0)
    lines = [json.loads(line) for line in (tmp_path / "events" / "orchestrator.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "engine_silent"]
    assert len(told) == 6, "once for each, however often it was asked"
    assert {(line["engines"], line["error"][:30]) for line in told} == {(6, "http://engine: no answer withi")}
    assert not any(line["kind"] == "engine_state" and line["state"] == "DOWN" for line in lines)


async def test_an_engine_that_is_gone_is_down_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        if machine.starved:
            raise httpx.ConnectError("connection refused")
        return machine(request)

    machine = Machine()
    loop = WeightUpdateLoop({"a": clients(monkeypatch, gone)}, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05)
    async with running(loop):
        await loop.want(PolicyVersion(1, "/v1"))
        await loop.wait_for(1, timeout_s=60)
        machine.starved = True
        assert await settled(lambda: loop.pool.state("a") == "DOWN")
        assert "connection refused" in (loop.pool.report()["a"].error or "")
    lines = [json.loads(line) for line in (tmp_path / "events" / "orchestrator.jsonl").read_text().splitlines()]
    (down,) = [line for line in lines if line["kind"] == "engine_state" and line["state"] == "DOWN"]
    assert "connection refused" in down["reason"]


async def test_a_stall_of_the_loop_itself_is_logged_and_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine()
    loop = WeightUpdateLoop({"a": clients(monkeypatch, machine)}, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05)
    journal = tmp_path / "events" / "orchestrator.jsonl"
    async with running(loop):
        await loop.want(PolicyVersion(1, "/v1"))
        await loop.wait_for(1, timeout_s=60)
        time.sleep(2.5)
        assert await settled(lambda: "loop_stood_still" in journal.read_text())
        assert loop.pool.state("a") == "CURRENT"
