"""The bytes of results in flight are limited over all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.orchestrator.rollouts import job_runner
from primeslurm.orchestrator.rollouts.flow_control import ReceiveWindow
from primeslurm.orchestrator.rollouts.job_protocol import Job, Result, ResultReady, SendResults, Status
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.orchestrator.rollouts.worker_pool import RESEND_S
from primeslurm.wire.batches.rollout import Rollout
from tests.support.waiting import wait_until_async
from tests.support.worker_pools import CallbackPool
from tests.unit.orchestrator.test_packing import group
from tests.unit.orchestrator.test_worker_pool import Pool, job


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(f"ipc://{tmp_path}/envs")
    made.pool._window = ReceiveWindow(100)
    yield made
    made.close()


def test_oldest_results_that_fit_are_admitted_first() -> None:
    window = ReceiveWindow(100)
    for name, size in (("a", 60), ("b", 60), ("c", 10)):
        window.offer(name, size)
    assert window.admit() == ["a"] and window.admit() == [], "nobody overtakes who waits for room"
    window.forget("a")
    assert window.admit() == ["b", "c"]


def test_result_larger_than_the_window_is_admitted_alone() -> None:
    window = ReceiveWindow(100)
    for name, size in (("small", 1), ("huge", 1000), ("other", 1000)):
        window.offer(name, size)
    found = []
    for _ in range(3):
        (name,) = window.admit()
        assert window.admit() == []
        window.forget(name)
        found.append(name)
    assert found == ["small", "huge", "other"] and window.admit() == []


def test_repeated_offer_counts_once_and_lost_result_is_requested_again() -> None:
    window = ReceiveWindow(100)
    for _ in range(2):
        window.offer("a", 60)
    assert window.admit() == ["a"] and window.admit() == []
    window.offer("a", 60)
    assert window.admit() == ["a"]
    window.offer("b", 60)
    window.forget("b")  # cancelled, or its worker is gone
    window.forget("a")
    assert window.admit() == []


async def test_all_workers_share_one_window(pool: Pool) -> None:
    for worker in (0, 1):
        await pool.hear(worker)
    for name in ("a", "b", "c"):
        await pool.pool.send(job(name))
    for name, worker in (("a", 0), ("b", 1), ("c", 0)):
        assert isinstance(found := await pool.given(worker), Job) and found.id == name
        await pool.tell(pool.sockets[worker], ResultReady(name, 60))
    assert await pool.given(0) == SendResults(["a"]) and list(pool.pool._window._in_flight) == ["a"]
    await pool.tell(pool.sockets[0], Result("a", error="e"))
    assert await pool.given(1) == SendResults(["b"]) and list(pool.pool._window._in_flight) == ["b"]
    await pool.pool.cancel(["b"])
    await pool.hear(0, "c")
    assert await pool.given(0) == SendResults(["c"]), "what is not wanted any more keeps no room"
    await pool.tell(pool.sockets[1], ResultReady("b", 60))
    assert list(pool.pool._window._in_flight) == ["c"] and not pool.pool._window._offered


async def test_result_lost_with_its_connection_is_requested_at_once(pool: Pool) -> None:
    await pool.hear(0)
    await pool.pool.send(job("a"))
    assert isinstance(await pool.given(0), Job)
    status = Status("e", 0, "1", [], held={"a": 60})
    await pool.tell(pool.sockets[0], status)
    assert await pool.given(0) == SendResults(["a"]), "also if nobody has said that it ended"
    await pool.tell(pool.sockets[0], status)
    assert not await pool.sockets[0].poll(0), "it is on its way"
    pool.sockets[0].close()
    pool.sockets[0] = pool.connect()
    await pool.tell(pool.sockets[0], status)
    assert await pool.given(0) == SendResults(["a"])
    pool.clock.now += RESEND_S + 1
    await pool.tell(pool.sockets[0], status)
    assert await pool.given(0) == SendResults(["a"]), "it was asked for long ago"


@pytest.mark.parametrize(("small", "requested"), [(0, 1), (1 << 20, 0)], ids=["requested", "sent at once"])
async def test_all_results_of_rollouts_that_end_together_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, requested: int
) -> None:
    monkeypatch.setattr(job_runner, "SMALL_RESULT", small)
    came: list[str] = []
    address, made = f"ipc://{tmp_path}/envs", group([5], [1.0]).rollouts[0]
    pool = CallbackPool(address, lambda name, outcome: came.append(name), came.append, lambda *unusable: None)
    pool._window = ReceiveWindow(1)
    most, admit = 0, pool._window.admit

    def admitted() -> list[str]:
        nonlocal most
        found = admit()
        most = max(most, len(pool._window._in_flight))
        return found

    monkeypatch.setattr(pool._window, "admit", admitted)

    async def done(job: Job) -> tuple[Rollout, ...]:
        return made

    runner = JobRunner("e", 0, address, done)
    tasks = [asyncio.create_task(part) for part in (pool.serve(), runner.serve())]
    await wait_until_async(lambda: pool.available)
    for number in range(20):
        await pool.send(job(str(number)))
    await wait_until_async(lambda: len(came) == 20)
    assert sorted(came, key=int) == [str(number) for number in range(20)] and most == requested
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
