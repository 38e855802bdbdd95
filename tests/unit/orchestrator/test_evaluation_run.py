"""The state machine of an evaluation, and which steps are due."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.dispatch import MAX_FAILURES
from primeslurm.orchestrator.evaluation.evaluation_run import EvaluationRun
from primeslurm.orchestrator.evaluation.evaluator import Evaluator
from primeslurm.orchestrator.evaluation.schedule import Schedule
from primeslurm.orchestrator.evaluation.statistics import Sample
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.wire.batches.rollouts import Rollout, RolloutInfo


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def evaluation(**changes: Any) -> EvaluationRun:
    environments = [
        EvaluationEnvironment(id="words", examples=3, samples=2),
        EvaluationEnvironment(id="sums", examples=2, samples=1),
    ]
    settings: dict[str, Any] = {"max_inflight": 100, "routers": ["a", "b"], "patience_s": 60.0, "longest_s": 240.0}
    settings |= {"salt": "run.1", "incarnation": "x"}
    return EvaluationRun(10, 12, environments, **settings | changes)


def drained(run: EvaluationRun, available: tuple[str, ...] = ("words", "sums"), version: int = 12) -> list[Job]:
    jobs = []
    while job := run.next_job(available, version):
        jobs.append(job)
    return jobs


def rollout(job: Job, reward: float = 1.0, versions: tuple[int, ...] = (12, 13)) -> tuple[Rollout, ...]:
    info = RolloutInfo(
        job.id, job.group, job.environment, job.opened_version, reward, {"own": 2.0, "odd": float("nan")}
    )
    tokens = np.arange(1 + len(versions), dtype=np.int32)
    mask = np.array([False, *[True] * len(versions)])
    return (Rollout(info, tokens, mask, np.zeros(len(tokens), np.float32), np.array([-1, *versions], np.int32)),)


def test_every_sample_runs_once_and_says_who_sampled_it() -> None:
    run = evaluation()
    jobs = drained(run)
    places = {("words", e, s) for e in range(3) for s in range(2)} | {("sums", e, 0) for e in range(2)}
    assert len(jobs) == run.total == run.inflight == 8 and len({job.id for job in jobs}) == 8
    assert Counter((job.environment, job.example) for job in jobs) == Counter((p[0], p[1]) for p in places)
    for job in jobs:
        assert not run.complete
        sample = run.finished(job.id, rollout(job))
        assert (sample.oldest_version, sample.newest_version, sample.tokens) == (12, 13, 2)
        assert sample.metrics == {"own": 2.0}
    assert run.complete and set(run.samples) == places and run.inflight == 0
    assert not run.runs(jobs[0].id)
    with pytest.raises(KeyError):
        run.finished(jobs[0].id, rollout(jobs[0]))


def test_it_has_a_bound_of_its_own_and_environments_share_it() -> None:
    run = evaluation(max_inflight=4)
    jobs = drained(run)
    assert Counter(job.environment for job in jobs) == {"words": 2, "sums": 2}
    run.finished(jobs[0].id, rollout(jobs[0]))
    assert len(drained(run)) == 1
    assert {job.environment for job in drained(evaluation(max_inflight=4), ("sums",))} == {"sums"}
    assert drained(evaluation(), ()) == []


def test_its_cache_salts_are_no_ones_else_and_change_with_the_policy() -> None:
    run = evaluation(max_inflight=1)
    (first,) = drained(run)
    assert first.cache_salt == "run.1:evaluation-10:12" != "run.1:12"
    run.finished(first.id, rollout(first))
    (second,) = drained(run, version=13)
    assert second.cache_salt == "run.1:evaluation-10:13" and second.opened_version == 13


def test_all_samples_of_an_example_go_to_one_replica() -> None:
    where: dict[tuple[str, int], set[str]] = {}
    run = evaluation()
    jobs = drained(run)
    for job in jobs:
        where.setdefault((job.environment, job.example), set()).add(job.router)
    assert run.load == Counter(job.router for job in jobs)
    assert all(len(routers) == 1 for routers in where.values()) and set.union(*where.values()) == {"a", "b"}


def test_a_failed_rollout_is_tried_again_and_then_counts_as_failed() -> None:
    run = evaluation()
    (job,) = drained(run, ("sums",))[:1]
    for number in range(1, MAX_FAILURES["environment"]):
        assert run.failed(job.id, f"failure {number}") is None
        (job,) = drained(run, ("sums",))
    sample = run.failed(job.id, "the last one")
    assert sample is not None and sample.error == "the last one" and sample.reward == 0
    assert drained(run, ("sums",)) == []


def test_samples_of_a_task_that_is_given_up_fail_whether_they_run_or_wait() -> None:
    run = evaluation()
    job, *others = drained(run, ("sums",))
    run.lost(job.id)  # it waits now
    samples, jobs = run.give_up("sums", job.example, "it kills its workers")
    assert {(sample.label, sample.example, sample.error) for sample in samples} == {
        ("sums", job.example, "it kills its workers")
    }
    assert jobs == [other.id for other in others if other.example == job.example]
    assert drained(run, ("sums",)) == [] or all(each.example != job.example for each in drained(run, ("sums",)))
    assert not any(run.runs(each) for each in jobs)


def test_a_reward_that_is_no_number_is_a_failure() -> None:
    run = evaluation()
    (job, *_) = drained(run)
    assert run.finished(job.id, rollout(job, reward=float("nan"))).error == "its reward is nan"


def test_a_lost_replica_costs_its_rollouts_and_nothing_else() -> None:
    run = evaluation()
    jobs = drained(run)
    there = [job.id for job in jobs if job.router == "a"]
    assert sorted(run.drop_router("a")) == sorted(there) and run.inflight == len(jobs) - len(there)
    again = drained(run)
    assert len(again) == len(there) and {job.router for job in again} == {"b"}
    for job in [*again, *(job for job in jobs if job.router == "b")]:
        run.finished(job.id, rollout(job))
    assert run.complete and all(sample.error is None for sample in run.samples.values())


def test_there_are_no_more_examples_than_tasks() -> None:
    run = evaluation()
    run.limit({"words": 2, "reverse-text": 1})
    assert run.total == 6 and {job.example for job in drained(run, ("words",))} == {0, 1}
    run.limit({"words": 2})
    assert run.total == 6


def test_a_restart_goes_on_with_what_is_there() -> None:
    there = [Sample("words", 0, 1, reward=0.5), Sample("sums", 1, 0, error="gone")]
    run = evaluation(ended=there)
    jobs = drained(run)
    assert len(jobs) == 6 and len(run.samples) == 2
    assert Counter((job.environment, job.example) for job in jobs)["words", 0] == 1
    for job in jobs:
        run.finished(job.id, rollout(job))
    assert run.complete and run.samples["words", 0, 1].reward == 0.5


def test_an_evaluation_that_stands_still_ends() -> None:
    clock = Clock()
    run = evaluation(clock=clock, max_inflight=3)
    jobs = drained(run)
    clock.now = 239
    assert run.expire() == ([], []), "rollouts may take so long"
    assert run.failed(jobs[0].id, "of an hour's tests") is None
    clock.now = 478
    assert run.expire() == ([], [])
    clock.now = 479
    failed, cancelled = run.expire()
    assert len(failed) == 8 and set(cancelled) == {jobs[1].id, jobs[2].id}
    assert {sample.error for sample in failed} == {"no rollout of the evaluation began or ended for 240 s"}
    assert run.complete and run.expire() == ([], []) and drained(run) == []


def test_rollouts_of_an_evaluation_may_take_as_long_as_their_stages(tmp_path: Path) -> None:
    limits = {"runtime": {"type": "subprocess", "limits": {"wall_time_s": 7200}}}
    for environment, longest_s in (({"id": "words"}, 4 * 3600), ({"id": "words"} | limits, 4 * 7200)):
        evaluation = {"environments": [environment], "interval": 10}
        recipe = {"name": "t", "seq_len": 64, "model": {"path": "m"}, "environments": [{"id": "sums"}]}
        made = Recipe.model_validate({**recipe, "max_steps": 20, "evaluation": evaluation})
        arguments = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], [])
        journal, metrics = Journal(tmp_path, "orchestrator"), MetricsLog(tmp_path, 0, tensorboard=False)
        evaluator = Evaluator(made, arguments, 10, "x", journal, metrics)
        evaluator.follow(10, {})
        assert evaluator._run is not None and evaluator._run.longest_s == longest_s


def test_an_evaluation_that_nobody_serves_is_not_waited_for_as_long() -> None:
    clock = Clock()
    run = evaluation(clock=clock)
    clock.now = 59
    assert drained(run, ()) == [] and run.expire() == ([], [])
    clock.now = 60
    assert len(run.expire()[0]) == 8


def test_while_engines_load_no_time_counts() -> None:
    clock = Clock()
    run = evaluation(clock=clock)
    clock.now = 3000
    run.wait()
    assert run.expire() == ([], []) and len(drained(run)) == 8


def schedule(settled: tuple[int, ...] = (), **changes: Any) -> Schedule:
    section = {"environments": [{"id": "words"}], "interval": 10, **changes}
    recipe = {"name": "t", "seq_len": 64, "max_steps": 25, "model": {"path": "m"}, "evaluation": section}
    return Schedule(Recipe.model_validate(recipe), settled)


def test_steps_of_the_interval_and_the_last_one_are_due() -> None:
    assert schedule().all_due(25) == [10, 20, 25]
    assert schedule(interval=5).all_due(25) == [5, 10, 15, 20, 25], "the last step is due once"
    assert schedule(interval=100, at_start=True).all_due(25) == [0, 25]
    assert [schedule().owing(version) for version in (-1, 0, 9, 10, 19, 24, 25)] == [
        [],
        [],
        [],
        [10],
        [10],
        [10, 20],
        [10, 20, 25],
    ]
    assert schedule((10,)).owing(19) == [] and schedule((10,)).owing(23) == [20]


def test_what_came_before_a_settled_step_is_not_made_up_for() -> None:
    assert schedule((20,)).owing(24) == [] and schedule((20,)).owing(25) == [25]
    assert schedule((25,)).owing(25) == []


def test_the_model_as_it_was_is_evaluated_at_version_0_or_not_at_all() -> None:
    assert schedule(at_start=True).owing(0) == [0] and schedule(at_start=True).owing(1) == []
    assert schedule((0,), at_start=True).owing(0) == []


def test_without_evaluation_nothing_is_due() -> None:
    recipe = Recipe.model_validate({"name": "t", "seq_len": 64, "max_steps": 25, "model": {"path": "m"}})
    assert Schedule(recipe).owing(25) == []


def test_a_restarted_one_goes_on_with_what_its_workers_run() -> None:
    before = evaluation()
    first, second, *others = drained(before)
    ended = [before.finished(second.id, rollout(second))]
    after = evaluation(incarnation="y", ended=ended)
    assert after.adopt_job(first) and after.runs(first.id)
    assert not after.adopt_job(first), "it is already"
    assert not after.adopt_job(second), "its sample is there"
    assert not evaluation(routers=["b"], incarnation="z").adopt_job(others[0]) or others[0].router == "b"
    for odd in ({"cache_salt": "run.2:evaluation-10:12"}, {"cache_salt": "run.1:12"}, {"id": "x"}, {"task": None}):
        assert not after.adopt_job(msgspec.structs.replace(others[0], **odd))
    mine = drained(after)
    assert len(mine) == before.total - 2 and after.inflight == before.total - 1
    assert not after.adopt_job(others[0]), "its sample runs anew"
    assert after.failed(first.id, "no") is None and not after.adopt_job(first), "what has failed is not what goes on"
    for job in [*mine, *drained(after)]:
        after.finished(job.id, rollout(job))
    assert after.complete
