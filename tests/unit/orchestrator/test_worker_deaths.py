"""Tasks that kill or hang their workers are found and given up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, Examples
from primeslurm.orchestrator.rollouts import worker_deaths
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Cancel, Job, JobFailure, Result, Status, ToOrchestrator
from primeslurm.orchestrator.rollouts.worker_deaths import PATH, WorkerDeaths
from primeslurm.wire.batches.rollout import Rollout
from tests.support.worker_pools import CallbackPool
from tests.unit.orchestrator.test_dispatch import rollout

SIZE = 4
HANG_S = 300
"""After so many seconds the agent ends a worker that hangs."""


def job(example: int, member: int = 0, label: str = "e") -> Job:
    group = f"{label}-{example:08d}"
    return Job(f"{group}/{member}", group, label, example, 0, "router-0", "salt")


class SimulatedWorker:
    """A worker whose process dies, or hangs until it is ended, when it gets a certain task."""

    def __init__(self, number: int, node: str) -> None:
        self.number, self.node = number, node
        self.incarnation = 1
        self.jobs: dict[str, tuple[Job, float]] = {}
        self.seen = 0
        self.back_at = 0.0

    @property
    def identity(self) -> bytes:
        return f"{self.number}.{self.incarnation}".encode()


class Simulation:
    """Dispatcher and pool as the orchestrator joins them, and workers, second by second."""

    def __init__(
        self,
        address: str,
        workers: int,
        kills: Callable[[Job], bool],
        *,
        hangs: bool = False,
        inflight: int = 32,
        rollout_s: float = 5.0,
        deaths: WorkerDeaths | None = None,
        nodes: int = 1,
    ) -> None:
        self.now, self.kills, self.hangs, self.rollout_s = 1000.0, kills, hangs, rollout_s
        limits = DispatchLimits({"e": SIZE}, 4 * SIZE, inflight, 1_000_000, 10_000, {"e": 1.0}, oversampling=1e9)
        self.deaths = WorkerDeaths() if deaths is None else deaths
        guilty = {f"{label}-{example:08d}" for label, example in worker_deaths.example_positions(self.deaths.guilty)}
        self.dispatch = Dispatcher(limits, ["router-0"], "run.1", "i", examples=Examples({"e": 1.0}, taken=guilty))
        self.dispatch.version = 0
        self.workers = [SimulatedWorker(number, str(number % nodes)) for number in range(workers)]
        self.pool = CallbackPool(
            address,
            self._result,
            self._lost,
            lambda *_: None,
            clock=lambda: self.now,
            deaths=self.deaths,
            on_death=self._death,
        )
        self.pool._tell = self._tell  # type: ignore[method-assign, assignment]
        self.complete: set[int] = set()
        self.given_up: list[int] = []
        self.killed = Counter[int]()
        self.lost = 0
        self._cancelled: list[str] = []

    def close(self) -> None:
        self.pool._socket.close()

    def _result(self, name: str, outcome: tuple[Rollout, ...] | JobFailure) -> None:
        if not self.dispatch.runs(name):
            return
        group: RolloutGroup | None = self.dispatch.finished(name, rollout(self._jobs[name]))
        if group is not None:
            self.dispatch.rejected(group, "done")
            self.complete.add(group.example)

    def _lost(self, name: str) -> None:
        if self.dispatch.runs(name):
            self.lost += 1
            self.dispatch.lost(name)

    def _death(self, environment: str, worker: int, guilty: list[Job]) -> None:
        for each in guilty:
            self.given_up.append(each.example)
            self._cancelled += self.dispatch.give_up(environment, each.example)

    async def _tell(self, identity: bytes, message: object) -> None:
        worker = next(each for each in self.workers if each.identity == identity)
        if isinstance(message, Cancel):
            for name in message.jobs:
                worker.jobs.pop(name, None)
        if not isinstance(message, Job):
            return
        if self.now < worker.back_at:
            return  # to a process that is dead
        worker.jobs[message.id] = message, self.now
        worker.seen = max(worker.seen, message.number)
        if self.kills(message):
            self.killed[message.example] += 1
            worker.back_at = self.now + (HANG_S if self.hangs else 4)

    async def _say(self, worker: SimulatedWorker, message: ToOrchestrator) -> None:
        await self.pool._receive(worker.identity, [msgspec.msgpack.encode(message)])

    _jobs: dict[str, Job] = {}

    async def second(self) -> None:
        self.now += 1
        for worker in self.workers:
            if self.now < worker.back_at:
                continue
            if worker.back_at:
                worker.back_at, worker.jobs, worker.seen = 0.0, {}, 0
                worker.incarnation += 1
            for name, (each, since) in list(worker.jobs.items()):
                if self.now - since >= self.rollout_s:
                    del worker.jobs[name]
                    self._jobs[name] = each
                    await self._say(worker, Result(name, error="stands for a result"))
            running = list(worker.jobs)
            status = Status(
                "e", worker.number, f"{worker.incarnation:016}", running, seen=worker.seen, node=worker.node
            )
            await self._say(worker, status)
        self.pool.expire()
        cancelled, self._cancelled = self._cancelled, []
        await self.pool.cancel(cancelled)
        while found := self.dispatch.next_job(self.pool.available):
            await self.pool.send(found)

    async def run(self, until: Callable[[], bool], longest_s: int) -> None:
        for _ in range(longest_s):
            await self.second()
            if until():
                return
        raise AssertionError(f"after {longest_s} s: {self.complete} {self.given_up} {self.killed}")


Simulate = Callable[..., Simulation]


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Simulate]:
    """A function that makes simulations, which are closed after the test."""
    made: list[Simulation] = []

    def make(workers: int, kills: Callable[[Job], bool], **options: Any) -> Simulation:
        made.append(Simulation(f"ipc://{tmp_path}/envs-{len(made)}", workers, kills, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def every_37th(each: Job) -> bool:
    return each.example % 37 == 36


@pytest.mark.parametrize("workers", [1, 2, 6])
async def test_other_tasks_are_trained_while_every_37th_kills_its_worker(simulate: Simulate, workers: int) -> None:
    run = simulate(workers, every_37th)
    bad = {36, 73, 110, 147}
    await run.run(lambda: set(range(150)) - bad <= run.complete and bad <= set(run.given_up), 3000)
    assert all(every_37th(job(each)) for each in run.given_up), "no neighbour is blamed"
    assert max(run.killed[each] for each in (36, 73, 110)) <= SIZE + worker_deaths.DEATHS


@pytest.mark.parametrize("workers", [1, 4])
async def test_task_that_hangs_its_worker_is_found(simulate: Simulate, workers: int) -> None:
    run = simulate(workers, lambda each: each.example == 5, hangs=True)
    await run.run(lambda: set(range(40)) - {5} <= run.complete and bool(run.given_up), 20 * HANG_S)
    assert run.given_up == [5]


async def test_task_that_sometimes_kills_is_finished_or_given_up(simulate: Simulate) -> None:
    run = simulate(3, lambda each: each.example == 3 and "/2-" in each.id)
    await run.run(lambda: set(range(30)) - {3} <= run.complete and 3 in run.given_up, 2000)
    assert run.given_up == [3] and run.killed[3] <= 2 * SIZE


async def test_loss_of_a_node_makes_no_suspects(simulate: Simulate) -> None:
    run = simulate(4, lambda each: False, nodes=2)
    await run.run(lambda: bool(run.complete), 100)
    for worker in run.workers:
        if worker.node == "0":  # the head starts its processes on another node
            worker.back_at, worker.node = run.now + 40, "2"
    await run.run(lambda: len(run.complete) > 60, 500)
    assert run.lost and not run.deaths.suspects and not run.given_up


async def test_rollouts_are_repeated_after_an_unrelated_death(simulate: Simulate) -> None:
    run = simulate(2, lambda each: False)
    for _ in range(6):
        await run.run(lambda: bool(run.workers[0].jobs), 100)
        run.workers[0].back_at = run.now + 3
        await run.run(lambda: not run.workers[0].back_at, 10)
    await run.run(lambda: set(range(100)) <= run.complete, 1000)
    assert run.given_up == []


async def test_all_killing_tasks_are_given_up(simulate: Simulate) -> None:
    run = simulate(2, lambda each: True)
    await run.run(lambda: len(run.given_up) >= 8, 600)
    assert not run.complete


async def test_record_of_deaths_survives_restarts(simulate: Simulate, tmp_path: Path) -> None:
    run = simulate(2, lambda each: each.example == 1)
    await run.run(lambda: 1 in run.given_up, 500)
    worker_deaths.save_deaths(tmp_path, run.deaths)
    known = worker_deaths.load(tmp_path)
    assert known == run.deaths and worker_deaths.example_positions(known.guilty) == [("e", 1)]
    again = simulate(2, lambda each: each.example == 1, deaths=known)
    await again.run(lambda: {0, *range(2, 10)} <= again.complete, 200)
    assert not again.killed, "it is not dispatched again"
    (tmp_path / PATH).write_text(json.dumps({"suspects": 3}))
    assert worker_deaths.load(tmp_path) == WorkerDeaths()


def test_task_is_guilty_after_enough_deaths() -> None:
    deaths = WorkerDeaths()
    alone, companion = job(0), job(1)
    assert deaths.died([alone]) == [] and deaths.died([alone]) == [alone]
    assert deaths.died([companion, job(2)]) == deaths.died([companion, job(3)]) == []
    assert deaths.together(companion) == deaths.together(job(2)) == 1 and deaths.together(job(9)) is None
    assert deaths.died([companion, job(1, 1)]) == [job(1, 1)], "two of its own rollouts are no company"
    deaths.ended(job(2))
    assert deaths.together(job(2)) is None and deaths.together(job(3)) == 1


def test_tasks_of_evaluation_and_training_are_distinct() -> None:
    deaths = WorkerDeaths()
    evaluated = msgspec.structs.replace(job(4), task=4)
    deaths.died([job(4)])
    assert deaths.together(evaluated) is None
    assert worker_deaths.example_positions({"a-b-00000012": 3, "a/b-00000002@7": 2, "odd": 1}) == [
        ("a-b", 12),
        ("a/b", 2),
    ]
