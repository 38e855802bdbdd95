"""The state machine of an evaluation, and the schedule of evaluations."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.dispatch import MAX_FAILURES
from primeslurm.orchestrator.evaluation.evaluation_run import EvaluationRun
from primeslurm.orchestrator.evaluation.evaluator import Evaluator, Schedule
from primeslurm.orchestrator.evaluation.results import Sample
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import MetricsLog
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.clock import Clock


def evaluation(**changes: Any) -> EvaluationRun:
    """An evaluation of 3 examples with 2 samples of `words`, and 2 examples with 1 sample of `sums`."""
    environments = [
        EvaluationEnvironment(id="words", examples=3, samples=2),
        EvaluationEnvironment(id="sums", examples=2, samples=1),
    ]
    settings: dict[str, Any] = {"max_inflight": 100, "routers": ["a", "b"], "salt_prefix": "run.1", "incarnation": "x"}
    settings |= {"start_timeout_s": 60.0, "rollout_timeout_s": 240.0}
    return EvaluationRun(10, 12, environments, **settings | changes)


def dispatch_all(run: EvaluationRun, available: tuple[str, ...] = ("words", "sums"), version: int = 12) -> list[Job]:
    jobs = []
    while job := run.next_job(available, version):
        jobs.append(job)
    return jobs


def rollout(job: Job, reward: float = 1.0, versions: tuple[int, ...] = (12, 13)) -> tuple[Rollout, ...]:
    metrics = {"own": 2.0, "odd": float("nan"), "no limit": sys.float_info.max}
    info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, reward, metrics)
    tokens = np.arange(1 + len(versions), dtype=np.int32)
    mask = np.array([False, *[True] * len(versions)])
    return (Rollout(info, tokens, mask, np.zeros(len(tokens), np.float32), np.array([-1, *versions], np.int32)),)


def test_every_sample_runs_once_and_records_its_policy_versions() -> None:
    run = evaluation()
    jobs = dispatch_all(run)
    keys = {("words", e, s) for e in range(3) for s in range(2)} | {("sums", e, 0) for e in range(2)}
    assert len(jobs) == run.total == run.inflight == 8 and len({job.id for job in jobs}) == 8
    assert Counter((job.environment, job.example) for job in jobs) == Counter(key[:2] for key in keys)
    for job in jobs:
        assert not run.complete
        sample = run.finished(job.id, rollout(job))
        assert (sample.oldest_version, sample.newest_version, sample.tokens) == (12, 13, 2)
        assert sample.metrics == {"own": 2.0}
    assert run.complete and set(run.samples) == keys and run.inflight == 0
    assert not run.runs(jobs[0].id)
    with pytest.raises(KeyError):
        run.finished(jobs[0].id, rollout(jobs[0]))


def test_environments_share_the_limit_of_rollouts_in_flight() -> None:
    run = evaluation(max_inflight=4)
    jobs = dispatch_all(run)
    assert Counter(job.environment for job in jobs) == {"words": 2, "sums": 2}
    run.finished(jobs[0].id, rollout(jobs[0]))
    assert len(dispatch_all(run)) == 1
    assert {job.environment for job in dispatch_all(evaluation(max_inflight=4), ("sums",))} == {"sums"}
    assert dispatch_all(evaluation(), ()) == []


def test_cache_salt_differs_from_training_and_between_policies() -> None:
    run = evaluation(max_inflight=1)
    (first,) = dispatch_all(run)
    assert first.cache_salt == "run.1:evaluation-10:12" != "run.1:12"
    run.finished(first.id, rollout(first))
    (second,) = dispatch_all(run, version=13)
    assert second.cache_salt == "run.1:evaluation-10:13" and second.opened_version == 13


def test_samples_of_an_example_go_to_the_same_replica() -> None:
    routers: dict[tuple[str, int], set[str]] = {}
    run = evaluation()
    jobs = dispatch_all(run)
    for job in jobs:
        routers.setdefault((job.environment, job.example), set()).add(job.router)
    assert run.load == Counter(job.router for job in jobs)
    assert all(len(each) == 1 for each in routers.values()) and set.union(*routers.values()) == {"a", "b"}


def test_failed_rollout_is_tried_again_until_its_sample_fails() -> None:
    run = evaluation()
    (job,) = dispatch_all(run, ("sums",))[:1]
    for number in range(1, MAX_FAILURES["environment"]):
        assert run.failed(job.id, f"failure {number}") is None
        (job,) = dispatch_all(run, ("sums",))
    sample = run.failed(job.id, "the last one")
    assert sample is not None and sample.error == "the last one" and sample.reward == 0
    assert dispatch_all(run, ("sums",)) == []


def test_giving_up_a_task_fails_its_waiting_and_running_samples() -> None:
    run = evaluation()
    job, *others = dispatch_all(run, ("words",))
    run.lost(job.id)  # its sample waits now
    samples, jobs = run.give_up("words", job.example, "it kills its workers")
    assert [(s.label, s.example, s.error) for s in samples] == [("words", job.example, "it kills its workers")] * 2
    assert jobs == [other.id for other in others if other.example == job.example]
    assert dispatch_all(run, ("words",)) == []
    assert not any(run.runs(each) for each in jobs)


def test_reward_that_is_not_finite_is_a_failure() -> None:
    run = evaluation()
    (job, *_) = dispatch_all(run)
    assert run.finished(job.id, rollout(job, reward=float("nan"))).error == "its reward is nan"


def test_rollouts_of_a_lost_replica_run_on_the_others() -> None:
    run = evaluation()
    jobs = dispatch_all(run)
    on_lost = [job.id for job in jobs if job.router == "a"]
    assert sorted(run.drop_router("a")) == sorted(on_lost) and run.inflight == len(jobs) - len(on_lost)
    again = dispatch_all(run)
    assert len(again) == len(on_lost) and {job.router for job in again} == {"b"}
    for job in [*again, *(job for job in jobs if job.router == "b")]:
        run.finished(job.id, rollout(job))
    assert run.complete and all(sample.error is None for sample in run.samples.values())


def test_there_are_no_more_examples_than_tasks() -> None:
    run = evaluation()
    for _ in range(2):
        run.limit({"words": 2, "reverse-text": 1})
        assert run.total == 6
    assert {job.example for job in dispatch_all(run, ("words",))} == {0, 1}


def test_restart_keeps_samples_that_have_ended() -> None:
    run = evaluation(ended=[Sample("words", 0, 1, reward=0.5), Sample("sums", 1, 0, error="gone")])
    jobs = dispatch_all(run)
    assert len(jobs) == 6 and len(run.samples) == 2
    assert Counter((job.environment, job.example) for job in jobs)["words", 0] == 1
    for job in jobs:
        run.finished(job.id, rollout(job))
    assert run.complete and run.samples["words", 0, 1].reward == 0.5


def test_remaining_samples_fail_if_no_rollout_ends() -> None:
    clock = Clock(0.0)
    run = evaluation(clock=clock, max_inflight=3)
    jobs = dispatch_all(run)
    clock.now = 239
    assert run.expire() == ([], []), "rollouts may take this long"
    assert run.failed(jobs[0].id, "a failure") is None
    clock.now = 478
    assert run.expire() == ([], [])
    clock.now = 479
    failed, cancelled = run.expire()
    assert len(failed) == 8 and set(cancelled) == {jobs[1].id, jobs[2].id}
    assert all("240 s" in str(sample.error) for sample in failed)
    assert run.complete and run.expire() == ([], []) and dispatch_all(run) == []


def test_remaining_samples_fail_earlier_if_no_rollout_can_start() -> None:
    clock = Clock(0.0)
    run = evaluation(clock=clock)
    clock.now = 59
    assert dispatch_all(run, ()) == [] and run.expire() == ([], [])
    clock.now = 60
    assert len(run.expire()[0]) == 8


def test_timeouts_do_not_run_while_engines_load() -> None:
    clock = Clock(0.0)
    run = evaluation(clock=clock)
    clock.now = 3000
    run.wait()
    assert run.expire() == ([], []) and len(dispatch_all(run)) == 8


@pytest.mark.parametrize(("runtime", "stage_s"), [({}, 3600), ({"limits": {"wall_time_s": 7200}}, 7200)])
def test_rollout_timeout_covers_all_stages(runtime: dict[str, Any], stage_s: float, tmp_path: Path) -> None:
    environment = {"id": "words"} | ({"runtime": {"type": "subprocess", **runtime}} if runtime else {})
    recipe = {"name": "t", "seq_len": 64, "model": {"path": "m"}, "environments": [{"id": "sums"}], "max_steps": 20}
    made = Recipe.model_validate({**recipe, "evaluation": {"environments": [environment], "interval": 10}})
    arguments = OrchestratorArguments(tmp_path, 1, "run", "", "", ["router-0"], [])
    journal, metrics = Journal(tmp_path, "orchestrator"), MetricsLog(tmp_path, 0, tensorboard=False)
    recorder = RolloutRecorder(tmp_path, 1, made.monitor.rollouts, lambda: 10)
    evaluator = Evaluator(made, arguments, 10, "x", journal, metrics, recorder)
    evaluator.follow(10, {})
    assert evaluator._run is not None and evaluator._run.rollout_timeout_s == 4 * stage_s


def test_restarted_evaluation_adopts_jobs_of_its_workers() -> None:
    before = evaluation()
    first, second, *others = dispatch_all(before)
    ended = [before.finished(second.id, rollout(second))]
    after = evaluation(incarnation="y", ended=ended)
    assert after.adopt_job(first) and after.runs(first.id)
    assert not after.adopt_job(first), "it is in flight already"
    assert not after.adopt_job(second), "its sample has ended"
    assert not evaluation(routers=["b"], incarnation="z").adopt_job(others[0]) or others[0].router == "b"
    for change in ({"cache_salt": "run.2:evaluation-10:12"}, {"cache_salt": "run.1:12"}, {"id": "x"}, {"task": None}):
        assert not after.adopt_job(msgspec.structs.replace(others[0], **change))
    new = dispatch_all(after)
    assert len(new) == before.total - 2 and after.inflight == before.total - 1
    assert not after.adopt_job(others[0]), "its sample is in flight again"
    assert after.failed(first.id, "no") is None and not after.adopt_job(first), "a failed job is not adopted"
    for job in [*new, *dispatch_all(after)]:
        after.finished(job.id, rollout(job))
    assert after.complete


def schedule(settled: tuple[int, ...] = (), **changes: Any) -> Schedule:
    section = {"environments": [{"id": "words"}], "interval": 10, **changes}
    recipe = {"name": "t", "seq_len": 64, "max_steps": 25, "model": {"path": "m"}, "evaluation": section}
    return Schedule(Recipe.model_validate(recipe), settled)


def test_steps_of_the_interval_and_the_last_step_are_due() -> None:
    assert schedule().all_due(25) == [10, 20, 25]
    assert schedule(interval=5).all_due(25) == [5, 10, 15, 20, 25], "the last step is due once"
    assert schedule(interval=100, at_start=True).all_due(25) == [0, 25]
    owing = {-1: [], 0: [], 9: [], 10: [10], 19: [10], 24: [10, 20], 25: [10, 20, 25]}
    assert {version: schedule().owing(version) for version in owing} == owing
    no_evaluation = Recipe.model_validate({"name": "t", "seq_len": 64, "max_steps": 25, "model": {"path": "m"}})
    assert Schedule(no_evaluation).owing(25) == []


def test_steps_before_a_settled_step_are_not_due() -> None:
    assert schedule((10,)).owing(19) == [] and schedule((10,)).owing(23) == [20]
    assert schedule((20,)).owing(24) == [] and schedule((20,)).owing(25) == [25]
    assert schedule((25,)).owing(25) == []


def test_initial_model_is_only_due_at_version_0() -> None:
    assert schedule(at_start=True).owing(0) == [0] and schedule(at_start=True).owing(1) == []
    assert schedule((0,), at_start=True).owing(0) == []
