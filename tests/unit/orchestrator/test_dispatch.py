"""The dispatcher: which groups open, which jobs run, and how groups end."""

from __future__ import annotations

import numpy as np
import pytest

from primeslurm.orchestrator.dispatch import MAX_FAILURES, Dispatcher, DispatchLimits, Examples
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

ALL = frozenset({"a", "b"})


def limits(off_policy: int = 1, **changes: object) -> DispatchLimits:
    fields = {"batch_size": 4, "max_inflight": 6, "max_steps": 50, "ratios": {"a": 1.0, "b": 3.0}, **changes}
    sizes = dict.fromkeys(fields["ratios"], 2)  # type: ignore[call-overload]
    return DispatchLimits(max_off_policy_steps=off_policy, **{"group_sizes": sizes, **fields})  # type: ignore[arg-type]


def make_dispatcher(limit: DispatchLimits, **state: object) -> Dispatcher:
    examples = Examples(limit.ratios, **state)  # type: ignore[arg-type]
    dispatcher = Dispatcher(limit, ["http://r0", "http://r1"], "run.1", "i", examples=examples)
    dispatcher.version = 0
    return dispatcher


def rollout(job: Job, version: int = 0) -> tuple[Rollout, ...]:
    info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, reward=1.0)
    return (
        Rollout(
            info, np.ones(2, np.int32), np.ones(2, np.bool_), np.zeros(2, np.float32), np.full(2, version, np.int32)
        ),
    )


def run_all(dispatcher: Dispatcher) -> list[Job]:
    jobs = []
    while job := dispatcher.next_job(ALL):
        jobs.append(job)
    return jobs


def test_complete_group_is_unfinished_until_it_is_on_disk() -> None:
    """A kill before the write loses the group, so its example is sampled again. Until then it counts as waiting."""
    dispatcher = make_dispatcher(limits(off_policy=0))
    jobs = {job.id: job for job in run_all(dispatcher)}
    complete: list[RolloutGroup] = []
    for _ in range(2):
        opened = next(iter(dispatcher.open))
        done = [dispatcher.finished(job.id, rollout(job)) for job in jobs.values() if job.group == opened]
        complete += [group for group in done if group is not None]
        assert not run_all(dispatcher), "one batch is open or waits, and another would be too old"
    assert dispatcher.unfinished == [(group.environment, group.example) for group in complete]
    dispatcher.rejected(complete[0], "dull")
    assert dispatcher.unfinished == [(complete[1].environment, complete[1].example)]
    assert {job.environment for job in run_all(dispatcher)}, "a rejected group is replaced"
    assert dispatcher.add_ready(complete[1])
    assert (complete[1].environment, complete[1].example) not in dispatcher.unfinished


def test_group_pins_router_version_and_salt() -> None:
    dispatcher = make_dispatcher(limits())
    first, second, third, *_ = run_all(dispatcher)
    assert first.group == second.group != third.group
    assert first.router == second.router != third.router
    assert {first.cache_salt, third.cache_salt} == {"run.1:0"}


def test_environments_get_their_share() -> None:
    dispatcher = make_dispatcher(limits(batch_size=80, max_inflight=80))
    labels = [job.environment for job in run_all(dispatcher)]
    assert labels.count("b") == 3 * labels.count("a") == 60


def test_environment_without_worker_waits() -> None:
    dispatcher = make_dispatcher(limits())
    job = dispatcher.next_job({"a"})
    assert job is not None and job.environment == "a"


def test_no_group_opens_that_would_become_too_old() -> None:
    dispatcher = make_dispatcher(limits(off_policy=0, max_inflight=100))
    assert len(run_all(dispatcher)) == 4, "only step 1 may train a group of version 0"
    dispatcher = make_dispatcher(limits(off_policy=2, max_inflight=100))
    assert len(run_all(dispatcher)) == 12


def test_slow_trainer_gets_no_long_queue() -> None:
    dispatcher = make_dispatcher(limits(off_policy=8, max_inflight=4))
    for _ in range(10):
        for job in run_all(dispatcher):
            if done := dispatcher.finished(job.id, rollout(job)):
                dispatcher.add_ready(done)
    assert len(dispatcher.ready) == 4, "two batches, although eight would be fresh"


def test_no_group_opens_beyond_the_last_step() -> None:
    dispatcher = make_dispatcher(limits(off_policy=8, max_inflight=100, max_steps=2))
    assert len(run_all(dispatcher)) == 8


def test_open_groups_are_dispatched_before_new_ones() -> None:
    dispatcher = make_dispatcher(limits())
    jobs = run_all(dispatcher)
    dispatcher.lost(jobs[0].id)
    again = dispatcher.next_job(ALL)
    assert again is not None and again.group == jobs[0].group and again.id != jobs[0].id


def test_repeated_failure_gives_up_the_group() -> None:
    dispatcher = make_dispatcher(limits(max_inflight=2))
    first, second = run_all(dispatcher)
    for _ in range(MAX_FAILURES["environment"] - 1):
        assert dispatcher.failed(first.id) == []
        (first,) = run_all(dispatcher)
    assert dispatcher.failed(first.id) == [second.id]
    assert first.group not in dispatcher.open and dispatcher.counts["groups_dropped_failed"] == 1


def test_stale_groups_are_dropped_in_every_state() -> None:
    dispatcher = make_dispatcher(limits(off_policy=1))
    jobs = run_all(dispatcher)
    for job in jobs[:2]:
        group = dispatcher.finished(job.id, rollout(job))
    assert group is not None and dispatcher.add_ready(group)
    stale, cancelled, _ = dispatcher.apply_age_limit(3)
    assert [g.id for g in stale] == [jobs[0].group] and cancelled == [job.id for job in jobs[2:]]
    assert dispatcher.inflight == 0 and dispatcher.counts["rollouts_dropped_stale"] == 2 + len(jobs[2:])


def test_rejected_group_is_replaced() -> None:
    dispatcher = make_dispatcher(limits(max_inflight=2, ratios={"a": 1.0}))
    opened = []
    for _ in range(3):
        jobs = run_all(dispatcher)
        opened.append(jobs[0].group)
        done = [dispatcher.finished(job.id, rollout(job)) for job in jobs][-1]
        assert done is not None
        dispatcher.rejected(done, "dull")
    assert opened == ["a-00000000", "a-00000001", "a-00000002"]
    assert dispatcher.counts["groups_rejected_dull"] == 3 and dispatcher.counts["finished"] == 6
    assert not dispatcher.ready and not dispatcher.open and not dispatcher.unfinished, "no prompt comes again"


def test_restart_opens_unfinished_groups_first() -> None:
    state = {"cursors": {"a": 2}, "unfinished": [("a", 0), ("a", 1)], "taken": {"a-00000000", "a-00000002"}}
    dispatcher = make_dispatcher(limits(max_inflight=2, ratios={"a": 1.0}), **state)
    groups = []
    for _ in range(2):
        jobs = run_all(dispatcher)
        groups.append(jobs[0].group)
        for job in jobs:
            done = dispatcher.finished(job.id, rollout(job))
        assert done is not None
        dispatcher.add_ready(done)
    assert groups == ["a-00000001", "a-00000003"]


def test_unknown_job_is_an_error() -> None:
    with pytest.raises(KeyError):
        make_dispatcher(limits()).lost("nobody")


def test_rollouts_of_a_lost_replica_move_to_the_others() -> None:
    dispatcher = make_dispatcher(limits())
    jobs = run_all(dispatcher)
    lost = [job for job in jobs if job.router == "http://r0"]
    assert lost and len(lost) < len(jobs)
    assert sorted(dispatcher.drop_router("http://r0")) == sorted(job.id for job in lost)
    assert dispatcher.counts["lost"] == len(lost)
    again = run_all(dispatcher)
    assert [job.router for job in again] == ["http://r1"] * len(lost)
    assert {job.group for job in again} == {job.group for job in lost}
    assert list(dispatcher.replicas.routers) == ["http://r1"]
