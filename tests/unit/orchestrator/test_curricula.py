"""Curricula: draws, outcomes, and their state after a restart."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.base import durable
from primeslurm.orchestrator.dispatch import Dispatcher, group_id
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula, DifficultyPools
from primeslurm.orchestrator.pipeline.progress import PROGRESS, ProgressFile, RunProgress, examples, limits, restore
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.task_order import first_epoch
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.curriculum import Curriculum
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import decode_msgpack
from tests.support.recipes import recipe_data
from tests.unit.orchestrator.test_dispatch import rollout

LABEL = "reverse-text"


def pools(tasks: int | None = 10, order: int | None = 0, **options: Any) -> DifficultyPools:
    made = DifficultyPools(Curriculum.model_validate(options), "seed", order)
    if tasks is not None:
        made.set_tasks(tasks)
    return made


@given(
    tasks=st.integers(1, 300),
    window=st.integers(1, 64),
    seed=st.integers(0, 3),
)
def test_first_epoch_has_every_task_once(tasks: int, window: int, seed: int) -> None:
    order = [first_epoch(position, seed, window, tasks) for position in range(tasks)]
    assert sorted(order) == list(range(tasks))
    assert all(abs(task - position) < window for position, task in enumerate(order))
    whole = tasks // window * window
    assert order[:whole] == [first_epoch(position, seed, window) for position in range(whole)], "known end or not"


def test_solve_rate_decides_the_pool() -> None:
    made = pools(alpha=0.5)
    for solved, rate, pool in ((1.0, 1.0, "easy"), (0.0, 0.5, "normal"), (0.0, 0.25, "hard"), (1.0, 0.625, "normal")):
        made.learn(3, solved)
        assert made._examples[3].rate == rate
        assert made.sizes == {**dict.fromkeys(("easy", "normal", "hard", "solved", "failed"), 0), "unseen": 9, pool: 1}


def test_draws_follow_the_shares() -> None:
    made = pools(400, shares={"unseen": 1, "easy": 1, "normal": 6, "hard": 2})
    for task in range(300):
        made.learn(task, (0.0, 0.5, 1.0)[task % 3])
    for position in range(5000):
        made.draw(position, ())
    shares = {name: count / 5000 for name, count in made.drawn.items()}
    assert shares == pytest.approx({"unseen": 0.1, "easy": 0.1, "normal": 0.6, "hard": 0.2}, abs=0.025)


def test_share_of_an_empty_pool_goes_to_the_others() -> None:
    made = pools(2, shares={"unseen": 1, "easy": 0, "normal": 1, "hard": 1})
    made.learn(0, 1.0)
    made.learn(1, 1.0)
    assert {made.draw(position, ()) for position in range(50)} == {0, 1} and made.drawn == {"easy": 50}


def test_retired_examples_are_the_last_resort() -> None:
    made = pools(3, retire_solved=2, retire_failed=2)
    for _ in range(2):
        made.learn(0, 1.0)
        made.learn(1, 0.0)
    assert made.sizes == {"unseen": 1, "easy": 0, "normal": 0, "hard": 0, "solved": 1, "failed": 1}
    assert {made.draw(position, ()) for position in range(20)} == {2}
    made.learn(2, 0.5)
    assert {made.draw(position, ()) for position in range(20)} == {2}
    made.learn(2, 1.0)
    made.learn(2, 1.0)
    assert {made.draw(position, ()) for position in range(50)} == {0, 1, 2}


def test_unseen_examples_come_in_order_and_dropped_ones_again() -> None:
    made = pools(8)
    first = [made.draw(position, ()) for position in range(8)]
    assert first == [first_epoch(position, 0, 2**17, 8) for position in range(8)]
    for task in first[:3] + first[4:]:
        made.learn(task, 0.5)
    assert made.sizes["unseen"] == 1
    drawn = [made.draw(position, ()) for position in range(8, 40)]
    assert first[3] in drawn and made.drawn["unseen"] > 8


def test_endless_taskset_always_has_unseen_examples() -> None:
    made = pools(None, shares={"unseen": 1, "easy": 0, "normal": 0, "hard": 0})
    drawn = []
    for position in range(3000):
        drawn.append(made.draw(position, ()))
        made.learn(drawn[-1], 1.0)
    assert len(set(drawn)) == 3000 and "unseen" not in made.sizes
    assert drawn == [first_epoch(position, 0, 1024) for position in range(3000)]


@given(seed=st.integers(0, 2**16), tasks=st.integers(1, 12), retire=st.none() | st.integers(1, 3))
def test_example_is_in_one_pool_and_runs_once_at_a_time(seed: int, tasks: int, retire: int | None) -> None:
    source, made = random.Random(seed), pools(tasks, retire_solved=retire, retire_failed=retire)
    running: list[int] = []
    for position in range(150):
        if len(running) < tasks and source.random() < 0.6:
            task = made.draw(position, set(running))
            assert task not in running and 0 <= task < tasks
            running.append(task)
        elif running:
            task = running.pop(source.randrange(len(running)))
            if source.random() < 0.8:  # the other groups are dropped
                made.learn(task, source.choice([0.0, 0.5, 1.0]))
        members = [task for names in made._members.values() for task in names]
        assert sorted(members) == sorted(made._examples) and sum(made.sizes.values()) == tasks
        for name, names in made._members.items():
            for index, task in enumerate(names):
                assert (made._examples[task].pool, made._examples[task].index) == (name, index)


RECIPE = Recipe.model_validate(
    recipe_data(
        max_steps=500,
        environments=[{"id": LABEL, "curriculum": {"retire_solved": 3}}],
        orchestrator={"batch_size": 8, "group_size": 2, "max_off_policy_steps": 2},
    )
)


class Life:
    """The dispatch side of an orchestrator that is killed between events."""

    def __init__(self, root: Path, seed: int) -> None:
        (root / "rollouts").mkdir()
        self.root, self.source = root, random.Random(seed)
        self.finished: list[RolloutGroup] = []
        """What the spool holds."""
        self.start()

    def start(self) -> None:
        progress = restore(self.root, 1)
        self.curricula = Curricula(RECIPE, self.root / OUTCOMES, progress.outcomes, progress.fresh)
        self.curricula.set_tasks({LABEL: 40})
        stream = examples(RECIPE, progress, self.curricula)
        self.dispatch = Dispatcher(limits(RECIPE), ["r0"], "run", "i", progress.next_step, examples=stream)
        self.dispatch.version = progress.next_step - 1
        self.jobs: list[Job] = []
        for group in self.finished:
            self.curricula.learn(group)
        gone = [group.id for group in self.finished if not self.dispatch.add_ready(group)]
        self.progress = ProgressFile(self.root / PROGRESS, progress, self.dispatch, self.curricula)
        self.forget(gone)

    def forget(self, names: list[str]) -> None:
        """Delete stale groups once it is recorded that their examples are sampled again."""
        if names:
            asyncio.run(self.progress.record(lambda now: {}))
            self.finished = [group for group in self.finished if group.id not in names]

    def finish_one(self) -> None:
        while job := self.dispatch.next_job({LABEL}):
            self.jobs.append(job)
        live = [job for job in self.jobs if self.dispatch.runs(job.id)]
        if live:
            job = self.source.choice(live)
            assert job.task is not None
            if (group := self.dispatch.finished(job.id, (rollout_of(job.task / 40 + 0.3),))) is not None:
                self.curricula.learn(group)
                self.finished.append(group)
                if not self.dispatch.add_ready(group):
                    self.forget([group.id])

    def train(self) -> list[str]:
        step = self.dispatch.step
        self.forget([group.id for group in self.dispatch.apply_age_limit(step).stale])
        groups = self.dispatch.take_batch() or []
        if groups:
            ids = [group.id for group in groups]
            formed = {"next_step": step + 1, "batches": {**self.progress.now.batches, step: ids}}
            asyncio.run(self.progress.record(lambda now: formed))
            self.finished = [group for group in self.finished if group.id not in ids]
            self.dispatch.version = step
        return [group.id for group in groups]


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16), kills=st.lists(st.integers(0, 200), max_size=4))
def test_kill_at_any_moment_loses_and_repeats_no_example(
    seed: int, kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    life = Life(tmp_path_factory.mktemp("life"), seed)
    trained: list[str] = []
    for moment in range(200):
        life.finish_one()
        if moment % 9 == 0:
            trained += life.train()
        if moment in kills:
            before = {task: example.rate for task, example in life.curricula._pools[LABEL]._examples.items()}
            recorded = life.progress.now
            life.start()
            assert {task: example.rate for task, example in life.curricula._pools[LABEL]._examples.items()} == before
            again = life.dispatch.counts["examples_returned"]
            assert recorded.drawn.items() <= life.dispatch.drawn.items(), "the unfinished groups keep their tasks"
            assert len(life.dispatch.drawn) == len(recorded.drawn) + again, "stale groups are sampled again"
    assert len(trained) == len(set(trained)) and len(trained) >= 20
    assert sum(life.curricula._pools[LABEL].sizes.values()) == 40


def test_draws_are_the_same_after_a_restart(tmp_path: Path) -> None:
    def learned(made: Curricula, first: int, last: int) -> list[int | None]:
        drawn = []
        for position in range(first, last):
            drawn.append(made.draw(LABEL, position, ()))
            made.learn(group_of(position, drawn[-1]))
        return drawn

    def group_of(position: int, task: int | None) -> RolloutGroup:
        made = rollout_of(position % 3 / 2)
        return RolloutGroup(group_id(LABEL, position), LABEL, position, 0, ((made,), (made,)), task)

    one = Curricula(RECIPE, tmp_path / "a")
    one.set_tasks({LABEL: 40})
    whole = learned(one, 0, 300)
    two = Curricula(RECIPE, tmp_path / "b")
    two.set_tasks({LABEL: 40})
    first = learned(two, 0, 150)
    size, fresh = asyncio.run(two.flush()), two.fresh
    learned(two, 150, 200)
    asyncio.run(two.flush())  # undone below, by a checkpoint that counts fewer bytes
    again = Curricula(RECIPE, tmp_path / "b", size, fresh)
    again.set_tasks({LABEL: 40})
    assert first + learned(again, 150, 300) == whole
    asyncio.run(again.flush())
    assert len((tmp_path / "b").read_bytes().splitlines()) == 300, "undone outcomes are overwritten"


def rollout_of(reward: float) -> Rollout:
    (made,) = rollout(Job("j", "g", LABEL, 0, 0, "r", "s"))
    return replace(made, info=msgspec.structs.replace(made.info, reward=reward))


def test_full_disk_loses_no_outcome(tmp_path: Path) -> None:
    made = Curricula(RECIPE, tmp_path / "missing" / "outcomes")
    made.set_tasks({LABEL: 40})
    group = RolloutGroup(group_id(LABEL, 0), LABEL, 0, 0, ((rollout_of(1.0),),), 7)
    made.learn(group)
    assert asyncio.run(made.flush()) == 0
    (tmp_path / "missing").mkdir()
    size = asyncio.run(made.flush())
    assert size == (tmp_path / "missing" / "outcomes").stat().st_size > 0
    again = Curricula(RECIPE, tmp_path / "missing" / "outcomes", size)
    again.learn(group)
    assert asyncio.run(again.flush()) == size, "the outcome is known"
    assert again.take_metrics()[f"env/{LABEL}/pool/easy"] == 1.0


def test_outcomes_are_on_disk_before_a_checkpoint_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rollouts", "checkpoint"):
        (tmp_path / name).mkdir()
    may_flush, sync, done = threading.Event(), durable.sync, []
    curricula = Curricula(RECIPE, tmp_path / OUTCOMES)
    dispatch = Dispatcher(limits(RECIPE), ["r0"], "run", "i")
    file = ProgressFile(tmp_path / PROGRESS, RunProgress(1), dispatch, curricula)

    def note(name: str) -> None:
        assert threading.current_thread() is not threading.main_thread() and may_flush.wait(60)
        done.append(name)

    def flush(path: Path) -> None:
        note(path.name)
        sync(path)

    def learn(position: int) -> None:
        curricula.learn(RolloutGroup(group_id(LABEL, position), LABEL, position, 0, ((rollout_of(1.0),),), position))

    async def save_and_record() -> None:
        learn(0)
        saving = asyncio.create_task(file.save(tmp_path / "checkpoint" / "part", before=lambda: note("events")))
        recording = asyncio.create_task(file.record(lambda now: {"next_step": 2}))
        for _ in range(10):
            await asyncio.sleep(0)
        learn(1)
        may_flush.set()
        await asyncio.gather(saving, recording)

    monkeypatch.setattr(durable, "sync", flush)
    asyncio.run(save_and_record())
    assert done == ["outcomes.jsonl", "events", "checkpoint", "outcomes.jsonl", "rollouts"]
    part = decode_msgpack((tmp_path / "checkpoint" / "part").read_bytes(), RunProgress)
    lines = (tmp_path / OUTCOMES).read_bytes().splitlines(keepends=True)
    assert (part.next_step, part.outcomes) == (1, len(lines[0])), "outcomes learned meanwhile count in the next record"
    assert (file.now.next_step, file.now.outcomes) == (2, sum(map(len, lines)))


def test_record_of_a_step_does_not_grow_with_the_examples(tmp_path: Path) -> None:
    made = Curricula(RECIPE, tmp_path / "outcomes")
    made.set_tasks({LABEL: 100_000})
    sizes = [0]
    for position in range(5000):
        task = made.draw(LABEL, position, ())
        made.learn(RolloutGroup(group_id(LABEL, position), LABEL, position, 0, ((rollout_of(1.0),),), task))
        if position % 50 == 49:
            sizes.append(asyncio.run(made.flush()))
    steps = [after - before for before, after in pairwise(sizes)]
    assert max(steps) < 50 * 48
    progress = RunProgress(1, fresh=made.fresh, outcomes=sizes[-1])
    assert len(msgspec.msgpack.encode(progress)) < 500
