"""The worker pool with many workers, real sockets and a fake clock."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from primeslurm.orchestrator.dispatch.dispatcher import Dispatcher
from primeslurm.orchestrator.dispatch.limits import DispatchLimits
from primeslurm.orchestrator.rollouts.job_protocol import (
    Cancel,
    Describe,
    Job,
    JobDescriptions,
    JobFailure,
    Result,
    SendResults,
    Status,
    ToOrchestrator,
    ToWorker,
)
from primeslurm.orchestrator.rollouts.job_runner import give_notice
from primeslurm.orchestrator.rollouts.worker_pool import DELIVERY_TIMEOUT_S, GIVE_UP_S, NO_NEW_JOBS_S, REASSIGN_S
from primeslurm.wire.transport import curve
from tests.support.clock import Clock
from tests.support.waiting import wait_until_async
from tests.support.worker_pools import CallbackPool

NODES, WORKERS, ROLLOUTS = 16, 512, 10_000


class Pool:
    """A pool, and workers at the other end of real sockets."""

    def __init__(self, address: str, **options: Any) -> None:
        self.clock, self.address = Clock(), address
        self.lost: list[str] = []
        self.results: list[tuple[str, object]] = []
        self.unusable: list[tuple[str, int, str]] = []
        told = (lambda *result: self.results.append(result), self.lost.append, lambda *why: self.unusable.append(why))
        self.pool = CallbackPool(address, *told, clock=self.clock, **options)
        self.sockets: dict[int, zmq.asyncio.Socket] = {}

    def connect(self) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        curve.secure_client(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self.address)
        return socket

    async def hear(self, worker: int, *jobs: str, node: str = "", incarnation: str = "1", label: str = "e") -> None:
        """One status of a worker, all the way through its socket."""
        if worker not in self.sockets:
            self.sockets[worker] = self.connect()
        await self.tell(self.sockets[worker], Status(label, worker, incarnation, list(jobs), node=node))

    async def tell(self, socket: zmq.asyncio.Socket, message: ToOrchestrator, *frames: bytes) -> None:
        await socket.send_multipart([msgspec.msgpack.encode(message), *frames])
        identity, *received = await self.pool._socket.recv_multipart()
        await self.pool._receive(identity, received)

    async def given(self, worker: int, keep_number: bool = False) -> ToWorker:
        found: ToWorker = msgspec.msgpack.decode(await asyncio.wait_for(self.sockets[worker].recv(), 60), type=ToWorker)
        return found if keep_number or not isinstance(found, Job) else msgspec.structs.replace(found, number=0)

    def wait(self, seconds: float) -> None:
        """Time passes, in which the orchestrator looks after its workers as it does."""
        for _ in range(math.ceil(seconds)):
            self.clock.now += 1.0
            self.pool.expire()

    def load(self) -> Counter[int]:
        return Counter(owner.number for owner in self.pool._owners.values())

    def close(self) -> None:
        for socket in [*self.sockets.values(), self.pool._socket]:
            socket.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/envs"


@pytest.fixture
def pool(address: str) -> Iterator[Pool]:
    made = Pool(address)
    yield made
    made.close()


def job(name: str, label: str = "e") -> Job:
    return Job(name, "g", label, 0, 0, "router-0", "salt")


def dispatcher() -> Dispatcher:
    limits = DispatchLimits({"e": 16}, ROLLOUTS // 2 // 16 * 16, ROLLOUTS, 8, 500, {"e": 1.0})
    found = Dispatcher(limits, ["router-0"], "run.1", "i")
    found.version = 0
    return found


async def test_ten_thousand_rollouts_over_512_workers_on_16_nodes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in range(WORKERS):
        await pool.hear(worker, node=str(worker % NODES))
    jobs, dispatch = 0, dispatcher()
    while found := dispatch.next_job(pool.pool.available):
        await pool.pool.send(found)
        jobs += 1
    assert jobs == ROLLOUTS == dispatch.inflight
    load = pool.load()
    assert max(load.values()) - min(load.values()) <= 1 and len(load) == WORKERS
    by_node = Counter[int]()
    for worker, count in load.items():
        by_node[worker % NODES] += count
    assert max(by_node.values()) - min(by_node.values()) <= 1
    assert pool.pool.load == {str(node): count for node, count in by_node.items()}

    class FileWatcher(dict[tuple[str, int], Any]):
        """Counts who goes through all workers."""

        walks = 0

        def __iter__(self) -> Iterator[tuple[str, int]]:
            self.walks += 1
            return super().__iter__()

        def values(self) -> Any:
            self.walks += 1
            return super().values()

    everybody = FileWatcher(pool.pool._live)
    monkeypatch.setattr(pool.pool, "_live", everybody)
    pool.clock.now += 1
    for worker in range(WORKERS):
        mine = [name for name, owner in pool.pool._owners.items() if owner.number == worker] if worker < 3 else []
        await pool.hear(worker, *mine, node=str(worker % NODES))
    await pool.tell(pool.sockets[0], Result(next(iter(pool.pool._owners)), error="e"))
    assert everybody.walks == 0 and len(pool.results) == 1 and pool.lost == []


async def test_node_without_heartbeats_gets_no_jobs_and_then_loses_its_own(pool: Pool) -> None:
    for worker in range(4):
        await pool.hear(worker, node="ab"[worker // 2])
    for name in "wxyz":
        await pool.pool.send(job(name))
    mine = [name for name, owner in pool.pool._owners.items() if owner.number < 2]
    for _ in range(int(REASSIGN_S / NO_NEW_JOBS_S) + 1):
        pool.wait(NO_NEW_JOBS_S)
        for worker in (2, 3):
            await pool.hear(worker, *(n for n, owner in pool.pool._owners.items() if owner.number == worker), node="b")
        pool.wait(1)
        await pool.pool.send(job(f"later {pool.clock.now}"))
    assert sorted(pool.lost) == sorted(mine) and len(mine) == 2
    assert set(pool.load()) == {2, 3} and pool.pool.environments == {"e"} and pool.pool.load.keys() == {"b"}
    await pool.hear(0, node="b", incarnation="2")  # moved to the node that is left
    for name in ("m", "n", "o"):
        await pool.pool.send(job(name))
    assert pool.load()[0] >= 2


async def test_delay_of_the_orchestrator_loses_no_worker(pool: Pool) -> None:
    await pool.hear(0)
    await pool.pool.send(job("a"))
    pool.wait(2)
    pool.clock.now += 10 * GIVE_UP_S
    pool.pool.expire()
    assert pool.lost == [] and pool.pool.available == {"e"}
    pool.wait(GIVE_UP_S)
    assert pool.lost == ["a"]


async def test_jobs_of_a_stopped_worker_are_reassigned_and_it_returns(pool: Pool) -> None:
    for worker in range(2):
        await pool.hear(worker)
    dispatch, started = dispatcher(), {}
    for _ in range(4):
        found = dispatch.next_job({"e"})
        assert found is not None
        started[found.id] = found
        await pool.pool.send(found)
    stopped = [name for name, owner in pool.pool._owners.items() if owner.number == 0]
    assert len(stopped) == 2
    for _ in range(int(REASSIGN_S) + 1):
        pool.wait(1)
        await pool.hear(1, *(name for name, owner in pool.pool._owners.items() if owner.number == 1))
    assert sorted(pool.lost) == sorted(stopped)
    for name in pool.lost:
        dispatch.lost(name)
    again = [dispatch.next_job(pool.pool.available) for _ in stopped]
    for found in again:
        assert found is not None and found.id not in started
        await pool.pool.send(found)
    assert pool.load() == {1: 4} and dispatch.inflight == 4
    await pool.tell(pool.sockets[0], Result(stopped[0], error="late"))
    assert pool.results == [], "it was taken back"
    await pool.hear(0, *stopped)  # continued, with what it ran
    for _ in stopped:
        await pool.given(0)
    assert await pool.given(0) == Describe(sorted(stopped))
    await pool.tell(pool.sockets[0], JobDescriptions([started[name] for name in sorted(stopped)]))
    assert await pool.given(0) == Cancel(sorted(stopped)), "others have them"
    await pool.pool.send(job("new"))
    assert pool.load() == {0: 1, 1: 4} and pool.pool.available == {"e"}


async def test_only_worker_of_an_environment_keeps_its_jobs_longer(pool: Pool) -> None:
    await pool.hear(0)
    await pool.hear(1, label="other")
    await pool.pool.send(job("a"))
    for _ in range(int(GIVE_UP_S)):
        pool.wait(1)
        await pool.hear(1, label="other")
    assert pool.lost == []
    pool.wait(1)
    assert pool.lost == ["a"]


async def test_busy_environment_code_costs_its_rollouts_once(pool: Pool) -> None:
    async def silent_for(seconds: int, busy_s: float) -> None:
        for _ in range(seconds):
            pool.wait(1)
            await pool.hear(1)
        await pool.tell(pool.sockets[0], Status("e", 0, "1", [], busy_s=busy_s))

    for worker in range(2):
        await pool.hear(worker)
    for name, seconds, busy_s, taken in (
        ("stopped", 25, 0.1, True),
        ("stopped again", 25, 0.1, True),
        ("computes", 25, 24.0, True),
        ("computes again", 25, 24.0, False),
        ("computes longer", 49, 48.0, False),
        ("is stopped for long", 60, 0.1, True),
    ):
        pool.pool._nodes[""].listening["e"].pop(1)  # so that the first one gets it
        await pool.pool.send(job(name))
        await pool.hear(1)
        await silent_for(seconds, busy_s)
        assert (name in pool.lost) is taken, name
        await pool.pool.cancel([] if taken else [name])


async def test_slow_worker_gets_jobs_again(pool: Pool) -> None:
    await pool.hear(0)
    pool.wait(NO_NEW_JOBS_S + 1)
    assert pool.pool.available == set() and pool.pool.environments == {"e"}
    await pool.hear(0)
    assert pool.pool.available == {"e"}


async def test_job_is_lost_once_its_worker_has_received_and_no_longer_lists_it(pool: Pool) -> None:
    await pool.hear(0)
    for name in "ab":
        await pool.pool.send(job(name))
    first = await pool.given(0, keep_number=True)
    assert isinstance(first, Job)
    pool.clock.now += DELIVERY_TIMEOUT_S - 1
    await pool.hear(0)  # written before either came
    assert pool.lost == []
    await pool.tell(pool.sockets[0], Status("e", 0, "1", ["a"], seen=first.number))
    assert pool.lost == [], "it runs the first, and has not seen the second"
    await pool.tell(pool.sockets[0], Status("e", 0, "1", [], seen=first.number))
    assert pool.lost == ["a"]
    pool.clock.now += 2
    await pool.tell(pool.sockets[0], Status("e", 0, "1", [], seen=first.number))
    assert pool.lost == ["a", "b"], "it was lost on the way"


async def test_job_numbers_grow_over_restarts(pool: Pool, address: str) -> None:
    await pool.hear(0)
    await pool.pool.send(job("a"))
    old = await pool.given(0, keep_number=True)
    pool.close()
    again = Pool(address)
    await again.hear(0, node="")
    await again.pool.send(job("b"))
    assert isinstance(old, Job)
    await again.tell(again.sockets[0], Status("e", 0, "1", [], seen=old.number))
    assert again.lost == []
    again.close()


async def test_old_incarnation_of_a_worker_is_cancelled(pool: Pool) -> None:
    await pool.hear(0, node="a", incarnation="1")
    await pool.pool.send(job("j"))
    assert await pool.given(0) == job("j")
    old = pool.sockets.pop(0)
    await pool.hear(0, node="b", incarnation="2")
    assert pool.lost == ["j"]
    await pool.pool.send(job("k"))
    await pool.tell(old, Status("e", 0, "1", ["j"], node="a"))
    assert msgspec.msgpack.decode(await old.recv(), type=ToWorker) == Cancel(["j"])
    await pool.hear(0, "k", node="b", incarnation="2")
    assert pool.lost == ["j"] and await pool.given(0) == job("k")
    old.close()


async def test_rollouts_per_node_are_limited(address: str) -> None:
    pool = Pool(address, max_per_node=3)
    for worker in range(3):
        await pool.hear(worker, node="a")
    await pool.hear(3, node="b", label="other")
    dispatch = Dispatcher(
        DispatchLimits({"e": 4, "other": 4}, 8, 8, 8, 9, {"e": 1.0, "other": 1.0}), ["r"], "run.1", "i"
    )
    dispatch.version = 0
    while found := dispatch.next_job(pool.pool.available):
        await pool.pool.send(found)
    assert dispatch.inflight == 6 and pool.pool.available == set()
    assert pool.load() == {0: 1, 1: 1, 2: 1, 3: 3}
    name = next(name for name, owner in pool.pool._owners.items() if owner.number == 3)
    await pool.tell(pool.sockets[3], Result(name, error="e"))
    assert pool.pool.available == {"other"}
    await pool.pool.cancel(list(pool.pool._owners))
    assert pool.pool.available == {"e", "other"} and not pool.load()
    pool.close()


async def test_node_with_fewer_workers_gets_fewer_jobs(pool: Pool) -> None:
    for worker, node in enumerate("aaab"):
        await pool.hear(worker, node=node)
    for number in range(40):
        await pool.pool.send(job(str(number)))
    assert set(pool.load().values()) == {10}


async def test_worker_that_cannot_start_reports_why(pool: Pool) -> None:
    serving = asyncio.create_task(pool.pool.serve())
    await asyncio.to_thread(give_notice, "e", 3, pool.address, ImportError("no index \ud83d"))
    await wait_until_async(lambda: pool.unusable)
    serving.cancel()
    assert pool.unusable == [("e", 3, "ImportError: no index \\ud83d")] and not pool.pool.environments


async def test_worker_keeps_its_jobs_after_a_reconnect(pool: Pool) -> None:
    await pool.hear(0)
    await pool.pool.send(job("a"))
    assert await pool.given(0) == job("a")
    pool.sockets[0].disconnect(pool.address)
    pool.sockets[0].connect(pool.address)
    await pool.hear(0, "a")
    await pool.pool.send(job("b"))
    assert await pool.given(0) == job("b"), "nothing was cancelled"
    await pool.tell(pool.sockets[0], Result("a", error="e"))
    assert pool.results == [("a", JobFailure("e"))] and pool.lost == []


async def test_message_with_several_results_ends_their_jobs(pool: Pool) -> None:
    await pool.hear(0)
    for name in ("a", "b", "c"):
        await pool.pool.send(job(name))
    others = map(msgspec.msgpack.encode, (Result("unknown", [1]), b"of a cancelled job", Result("b", error="e")))
    await pool.tell(pool.sockets[0], Result("a", [1]), b"damaged", *others)
    damaged, failed = pool.results
    assert damaged[0] == "a" and "damaged result" in str(damaged[1])
    assert failed == ("b", JobFailure("e")) and list(pool.pool._owners) == ["c"]


def of_killed(name: str) -> Job:
    """Return a job that a killed orchestrator has sent."""
    return msgspec.structs.replace(job(name), sender="killed", number=7)


async def test_jobs_of_a_killed_orchestrator_are_adopted_once(address: str) -> None:
    claims, held = list[str](), set[str]()

    def claim(job: Job, runs: bool) -> bool:
        claims.append(job.id)
        return True

    pool = Pool(address, claim=claim, keeps=held.__contains__)
    socket = pool.sockets[0] = pool.connect()
    runs, ended = map(of_killed, ("runs", "ended"))
    status = Status("e", 0, "x", ["runs"], held={"ended": 9}, seen=7)
    await pool.tell(socket, Result("ended", [1]), b"from before the restart")
    await pool.tell(socket, status)
    assert await pool.given(0) == Describe(["ended", "runs"]) and pool.results == []
    assert pool.pool.count_settled({"e"}) == 0
    await pool.tell(socket, JobDescriptions([runs, ended]))
    await pool.tell(socket, JobDescriptions([runs, ended]))
    assert claims == ["runs", "ended"], "a second answer claims nothing"
    assert pool.pool.load == {"": 2}
    await pool.tell(socket, status)
    assert await pool.given(0) == SendResults(["ended"]) and pool.pool.count_settled({"e"}) == 1
    await pool.tell(socket, status)  # written before the worker was asked: it is not asked twice
    await pool.tell(socket, Result("ended", error="e"))
    assert pool.results == [("ended", JobFailure("e"))]
    held.add("ended")
    await pool.tell(socket, status)
    await pool.tell(socket, Result("runs", error="e"))
    await pool.tell(socket, Status("e", 0, "x", [], held={"ended": 9}, seen=7))
    assert pool.pool.load == {"": 0} and pool.lost == []
    held.clear()  # its group is on disk
    await pool.tell(socket, Status("e", 0, "x", [], held={"ended": 9}, seen=7))
    assert await pool.given(0) == Describe(["ended"])
    pool.close()


async def test_adopted_job_that_its_worker_no_longer_has_is_lost(address: str) -> None:
    pool = Pool(address, claim=lambda job, runs: True)
    socket = pool.sockets[0] = pool.connect()
    await pool.tell(socket, Status("e", 0, "x", ["a"], seen=7))
    await pool.tell(socket, JobDescriptions([of_killed("a")]))
    await pool.tell(socket, Status("e", 0, "x", [], seen=7))
    assert pool.lost == ["a"]
    pool.close()
