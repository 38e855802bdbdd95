"""Polls of engines on busy machines: timeouts, which engine counts as down, and the rate of polls."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from primeslurm.orchestrator.dispatch.concurrency import Concurrency
from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, GAUGES, Sample, scrape
from primeslurm.orchestrator.telemetry.progress_monitor import ProgressMonitor
from primeslurm.orchestrator.weight_updates import engine_client
from primeslurm.orchestrator.weight_updates.engine_client import (
    EngineClient,
    EngineDownError,
    EngineUnresponsiveError,
    EventLoopDelayedError,
    PolicyVersion,
    Step,
)
from primeslurm.orchestrator.weight_updates.engine_pool import EnginePool
from primeslurm.orchestrator.weight_updates.polling import (
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    TICK_S,
    UNRESPONSIVE_S,
    AnswerTimeout,
    EventLoopDelay,
    RateLimiter,
)
from primeslurm.orchestrator.weight_updates.weight_update_loop import WeightUpdateLoop
from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal
from primeslurm.wire.weight_transfer.messages import EngineStatus
from tests.support.clock import Clock
from tests.support.recipes import recipe_data
from tests.support.waiting import wait_until_async

STATUS = {"version": 1, "incarnation": "a", "paused": False, "updates": 1, "initialized": True}


def test_timeout_follows_answer_times_within_bounds() -> None:
    timeout = AnswerTimeout()
    assert timeout.seconds == MIN_TIMEOUT_S
    timeout.answered(0.01)
    assert timeout.seconds == MIN_TIMEOUT_S
    timeout.answered(8.0)
    assert timeout.seconds == 16.0, "a slow engine gets more time at once"
    timeout.missed()
    assert timeout.seconds == 32.0
    timeout.missed()
    timeout.missed()
    assert timeout.seconds == MAX_TIMEOUT_S
    timeout.answered(0.01)
    assert timeout.seconds == MIN_TIMEOUT_S


def test_event_loop_delay_is_counted_while_it_lasts_and_reported_once() -> None:
    clock, reported = Clock(), []
    delay = EventLoopDelay(reported.append, clock=clock)
    delay.tick()
    clock.now += TICK_S
    assert delay.seconds() == 0.0
    clock.now += 7.0
    assert delay.seconds() == pytest.approx(7.0)
    delay.tick()
    delay.tick()
    assert delay.seconds() == pytest.approx(7.0) and reported == [pytest.approx(7.0)]


def test_rate_limiter_spreads_slots_and_saves_none() -> None:
    clock = Clock()
    limiter = RateLimiter(10.0, clock)
    assert [limiter.wait_s() for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    clock.now += 5.0
    assert limiter.wait_s() == 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    pool = EnginePool(["a", "b"], clock)
    pool.want(PolicyVersion(1, "/v1"))
    pool.updated("a", 1)
    pool.updated("b", 1)
    return pool


def test_updated_engine_that_answers_late_stays_current(pool: EnginePool) -> None:
    assert pool.missed("a", "no answer within 5 s") and not pool.missed("a", "no answer within 10 s")
    assert pool.state("a") == "CURRENT" and pool.unresponsive == 1
    pool.seen("a", EngineStatus(**STATUS))
    assert pool.unresponsive == 0 and pool.report()["a"].error is None


def test_engine_is_down_after_two_missing_answers_and_a_long_time(pool: EnginePool, clock: Clock) -> None:
    clock.now += UNRESPONSIVE_S + 1
    pool.missed("a", "no answer within 5 s")
    assert pool.state("a") == "CURRENT"
    pool.missed("a", "no answer within 10 s")
    assert pool.state("a") == "DOWN" and pool.current_version == 1
    assert pool.report()["a"].error == "no answer for 31 s: no answer within 10 s"
    pool.want(PolicyVersion(2, "/v2"))
    pool.updated("b", 2)
    assert pool.current_version == 2, "other engines do not wait for it"


def test_delay_of_the_orchestrator_does_not_make_engines_unresponsive(pool: EnginePool, clock: Clock) -> None:
    clock.now += 100
    pool.delayed(100)
    pool.missed("a", "x")
    pool.missed("a", "x")
    assert pool.state("a") == "CURRENT"


Answer = Callable[[httpx.Request], httpx.Response]


def clients(monkeypatch: pytest.MonkeyPatch, answer: Answer, **options: float) -> EngineClient:
    def client(*_: object, **__: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(engine_client, "internal_client", client)
    return EngineClient(lambda: "http://engine", "/model", **options)  # type: ignore[arg-type]


async def test_status_tells_unresponsive_engine_from_missing_engine_and_own_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unresponsive(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    control = clients(monkeypatch, unresponsive)
    for seconds in (5, 10, 20, 40, 60, 60):
        with pytest.raises(EngineUnresponsiveError, match=f"no answer within {seconds}.0 s"):
            await control.status()
    delays = iter([0.0, 30.0])
    with pytest.raises(EventLoopDelayedError, match=r"30\.0 s of 60\.0 s"):
        await control.status(lambda: next(delays))

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineDownError, match="refused") as error:
        await clients(monkeypatch, gone).status()
    assert not isinstance(error.value, EngineUnresponsiveError)

    def closing(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("closed")

    with pytest.raises(EngineUnresponsiveError, match="closed"):
        await clients(monkeypatch, closing).status()


class Machine:
    """Engines of a machine that may be too busy to answer."""

    def __init__(self) -> None:
        self.busy = False
        self.polls = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.polls += 1
        if self.busy:
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


async def test_engine_that_was_lost_before_the_orchestrator_started_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = {name: clients(monkeypatch, Machine()) for name in ("a", "b")}
    loop = WeightUpdateLoop(engines, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05, urls={"a": "http://a"})
    async with running(loop):
        loop.follow({"a": "http://a"})
        await wait_until_async(lambda: loop.pool.down_because("b") == "given up")
        await wait_until_async(lambda: loop.pool.state("a") != "DOWN")
        assert loop.pool.down_because("a") == ""


async def test_busy_engines_stay_current_and_are_logged_once_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine()
    engines = {f"e{i}": clients(monkeypatch, machine) for i in range(6)}
    loop = WeightUpdateLoop(engines, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05)
    async with running(loop):
        await loop.want(PolicyVersion(1, "/v1"))
        await loop.wait_for(1, timeout_s=60)
        await wait_until_async(lambda: all(loop.pool.state(name) == "CURRENT" for name in engines))
        machine.busy, before = True, machine.polls
        await wait_until_async(lambda: machine.polls > before + 24)
        assert {loop.pool.state(name) for name in engines} == {"CURRENT"}
        machine.busy = False
        await wait_until_async(lambda: loop.pool.unresponsive == 0)
    lines = [json.loads(line) for line in (tmp_path / "events" / "orchestrator.jsonl").read_text().splitlines()]
    events = [line for line in lines if line["kind"] == "engine_silent"]
    assert len(events) == 6
    assert {(line["engines"], line["error"][:30]) for line in events} == {(6, "http://engine: no answer withi")}
    assert not any(line["kind"] == "engine_state" and line["state"] == "DOWN" for line in lines)


async def test_parts_of_an_update_are_those_of_the_slowest_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine()
    engines = {name: clients(monkeypatch, machine) for name in ("a", "b", "c")}
    left: list[int] = []

    async def after_engine() -> None:
        left.append(loop.pool.wanting())

    loop = WeightUpdateLoop(engines, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05, after_engine=after_engine)
    assert loop.update_metrics() == {}
    for name, load in (("a", 3.0), ("b", 7.0), ("c", 9.0)):
        engine = engines[name]
        step = Step.CONFIRM if name == "c" else Step.UPDATE  # c has the weights already

        async def apply(*_: Any, step: Step = step) -> Step:
            return step

        monkeypatch.setattr(engine, "apply", apply)
        monkeypatch.setattr(engine, "seconds", {"wait": 10 - load, "load": load, "pause": load + 1})
    async with running(loop):
        await loop.want(PolicyVersion(2, "/v2"))
        await wait_until_async(lambda: loop.update_metrics().get("policy/update_pause_seconds") == 8.0)
        await wait_until_async(lambda: loop.pool.wanting() == 0)
    assert left[-1] == 0, "a trainer that waits for the last engine gets its answer"
    expected = {"wait": 7.0, "load": 7.0, "pause": 8.0}
    assert loop.update_metrics() == {f"policy/update_{name}_seconds": value for name, value in expected.items()}


async def test_missing_engine_is_down_at_once_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        if machine.busy:
            raise httpx.ConnectError("connection refused")
        return machine(request)

    machine = Machine()
    loop = WeightUpdateLoop({"a": clients(monkeypatch, gone)}, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05)
    async with running(loop):
        await loop.want(PolicyVersion(1, "/v1"))
        await loop.wait_for(1, timeout_s=60)
        machine.busy = True
        await wait_until_async(lambda: loop.pool.state("a") == "DOWN")
        assert "connection refused" in (loop.pool.report()["a"].error or "")
    lines = [json.loads(line) for line in (tmp_path / "events" / "orchestrator.jsonl").read_text().splitlines()]
    (down,) = [line for line in lines if line["kind"] == "engine_state" and line["state"] == "DOWN"]
    assert "connection refused" in down["reason"]


async def test_delay_of_the_event_loop_is_logged_and_engines_stay_current(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine()
    loop = WeightUpdateLoop({"a": clients(monkeypatch, machine)}, Journal(tmp_path, "orchestrator"), 30, poll_s=0.05)
    journal = tmp_path / "events" / "orchestrator.jsonl"
    async with running(loop):
        await loop.want(PolicyVersion(1, "/v1"))
        await loop.wait_for(1, timeout_s=60)
        time.sleep(2.5)
        await wait_until_async(lambda: "loop_stood_still" in journal.read_text())
        assert loop.pool.state("a") == "CURRENT"


ROUTERS = {"router-0": 40, "router-1": 40}
NAMES = ("engine-r0-0", "engine-r0-1", "engine-r1-0")


async def test_unresponsive_engine_is_distinguished_from_a_missing_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert await scrape(client, {"engine-r0-0": url}, timeout_s=0.5) == ({}, {"engine-r0-0"})
            assert await scrape(client, {"engine-r0-1": "http://127.0.0.1:9"}, timeout_s=60) == ({}, set())


class Looks:
    """The watch's looks at two replicas, and the shares that follow."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.concurrency = Concurrency(ROUTERS, NAMES, 1000, clock=lambda: self.now)
        recipe = Recipe.model_validate(recipe_data())
        self.watch = ProgressMonitor(
            recipe,
            Journal(directory, "orchestrator"),
            dict,
            lambda: self.now,
            looked=lambda samples: self.concurrency.observe(samples, ROUTERS, {}),
        )
        self.samples: dict[str, Sample] = {name: dict.fromkeys((*GAUGES, *COUNTERS), 0.0) for name in NAMES}

    def look(self, silent: Collection[str] = (), gone: Collection[str] = ()) -> dict[str, int]:
        self.now += 5
        for sample in self.samples.values():
            sample |= {"running": 20.0, "kv_usage": 0.5, "generated": sample["generated"] + 1000}
        answer = {name: dict(one) for name, one in self.samples.items() if name not in (*silent, *gone)}
        self.watch.engines_seen(answer, silent)
        return self.concurrency.slots


def test_slots_stay_during_a_short_gap_and_end_after_a_long_one(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for _ in range(6):
        before = looks.look()
    assert min(before.values()) > 0
    for _ in range(int(UNRESPONSIVE_S / 5)):
        after = looks.look(silent=NAMES)
        assert all(after[router] >= before[router] for router in ROUTERS), "all engines are busy at once"
    assert set(looks.look(silent=NAMES).values()) == {0}
    assert min(looks.look().values()) > 0, "they answer again"


def test_unresponsive_engine_keeps_its_slots_and_missing_engine_loses_them(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for _ in range(6):
        before = looks.look()
    assert looks.look(silent=["engine-r0-0"])["router-0"] >= before["router-0"]
    assert looks.look(gone=["engine-r0-0"])["router-0"] <= 0.75 * looks.concurrency.slots["router-1"] * 2
    gone = looks.look(gone=["engine-r0-0", "engine-r0-1"])
    assert gone["router-0"] == 0 and gone["router-1"] > 0
    assert looks.look(silent=["engine-r0-0", "engine-r0-1"])["router-0"] == 0, "what it said before is no more"


def test_unresponsive_engines_are_not_counted_in_the_load(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    for _ in range(3):
        looks.look()
    tokens = looks.watch._window.tokens
    looks.look(silent=NAMES)
    assert looks.watch._window.tokens == tokens and not looks.watch._roles, "status shows who answers"
