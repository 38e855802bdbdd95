"""The dispatcher: no trained group is too old, and every job is counted once, under any order of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.orchestrator.dispatch import MAX_FAILURES, Dispatcher, DispatchLimits, Examples
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.wire.batches.rollouts import Rollout, RolloutInfo

ALL = frozenset({"a", "b"})
ENDS = ("finished", "failed", "cancelled", "lost")


def limits(off_policy: int = 1, **changes: object) -> DispatchLimits:
    fields = {"batch_size": 4, "max_inflight": 6, "max_steps": 50, "ratios": {"a": 1.0, "b": 3.0}, **changes}
    sizes = dict.fromkeys(fields["ratios"], 2)  # type: ignore[call-overload]
    return DispatchLimits(max_off_policy_steps=off_policy, **{"group_sizes": sizes, **fields})  # type: ignore[arg-type]


def dispatcher(limit: DispatchLimits, **state: object) -> Dispatcher:
    examples = Examples(limit.ratios, **state)  # type: ignore[arg-type]
    made = Dispatcher(limit, ["http://r0", "http://r1"], "run.1", "i", examples=examples)
    made.version = 0
    return made


def rollout(job: Job, version: int = 0) -> tuple[Rollout, ...]:
    info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, reward=1.0)
    return (
        Rollout(
            info, np.ones(2, np.int32), np.ones(2, np.bool_), np.zeros(2, np.float32), np.full(2, version, np.int32)
        ),
    )


def run_all(made: Dispatcher) -> list[Job]:
    jobs = []
    while job := made.next_job(ALL):
        jobs.append(job)
    return jobs


def test_complete_group_is_unfinished_until_it_is_on_disk() -> None:
    """A kill before the write loses the group, so its example is sampled again. Until then it counts as waiting."""
    made = dispatcher(limits(off_policy=0))
    jobs = {job.id: job for job in run_all(made)}
    complete: list[RolloutGroup] = []
    for _ in range(2):
        opened = next(iter(made.open))
        done = [made.finished(job.id, rollout(job)) for job in jobs.values() if job.group == opened]
        complete += [group for group in done if group is not None]
        assert not run_all(made), "one batch is open or waits, and another would be too old"
    assert made.unfinished == [(group.environment, group.example) for group in complete]
    made.rejected(complete[0], "dull")
    assert made.unfinished == [(complete[1].environment, complete[1].example)]
    assert {job.environment for job in run_all(made)}, "a rejected group is replaced"
    assert made.add_ready(complete[1])
    assert (complete[1].environment, complete[1].example) not in made.unfinished


EVENTS = st.lists(st.tuples(st.sampled_from(["finish", "fail", "lose", "train", "current"]), st.integers(0, 99)))


@settings(max_examples=300)
@given(events=EVENTS, off_policy=st.integers(0, 3))
def test_any_order_of_events(events: list[tuple[str, int]], off_policy: int) -> None:
    made = dispatcher(limits(off_policy))
    jobs: dict[str, Job] = {}
    trained: list[str] = []
    for kind, number in events:
        jobs |= {job.id: job for job in run_all(made)}
        assert made.inflight <= 6
        running = [job for job in jobs.values() if made.runs(job.id)]
        if kind == "train":
            made.apply_age_limit(made.step)
            for group in made.take_batch() or []:
                step = made.step - 1
                assert group.opened_version >= step - 1 - off_policy
                assert len(group.rollouts) == 2
                assert group.id not in trained
                trained.append(group.id)
        elif kind == "current":
            made.version = made.step - 1
        elif running:
            job = running[number % len(running)]
            if kind == "finish":
                group_done = made.finished(job.id, rollout(job))
                if group_done:
                    made.add_ready(group_done)
            elif kind == "fail":
                for cancelled in made.failed(job.id):
                    assert not made.runs(cancelled)
            else:
                made.lost(job.id)
        assert made.counts["dispatched"] == sum(made.counts[how] for how in ENDS) + made.inflight


def test_group_pins_router_version_and_salt() -> None:
    made = dispatcher(limits())
    first, second, third, *_ = run_all(made)
    assert first.group == second.group != third.group
    assert first.router == second.router != third.router
    assert {first.cache_salt, third.cache_salt} == {"run.1:0"}


def test_environments_get_their_share() -> None:
    made = dispatcher(limits(batch_size=80, max_inflight=80))
    labels = [job.environment for job in run_all(made)]
    assert labels.count("b") == 3 * labels.count("a") == 60


def test_environment_without_worker_waits() -> None:
    made = dispatcher(limits())
    job = made.next_job({"a"})
    assert job is not None and job.environment == "a"


def test_no_group_opens_that_would_become_too_old() -> None:
    made = dispatcher(limits(off_policy=0, max_inflight=100))
    assert len(run_all(made)) == 4, "only step 1 may train a group of version 0"
    made = dispatcher(limits(off_policy=2, max_inflight=100))
    assert len(run_all(made)) == 12


def test_slow_trainer_gets_no_long_queue() -> None:
    made = dispatcher(limits(off_policy=8, max_inflight=4))
    for _ in range(10):
        for job in run_all(made):
            if done := made.finished(job.id, rollout(job)):
                made.add_ready(done)
    assert len(made.ready) == 4, "two batches, although eight would be fresh"


def test_no_group_opens_beyond_the_last_step() -> None:
    made = dispatcher(limits(off_policy=8, max_inflight=100, max_steps=2))
    assert len(run_all(made)) == 8


def test_open_groups_are_dispatched_before_new_ones() -> None:
    made = dispatcher(limits())
    jobs = run_all(made)
    made.lost(jobs[0].id)
    again = made.next_job(ALL)
    assert again is not None and again.group == jobs[0].group and again.id != jobs[0].id


def test_repeated_failure_gives_up_the_group() -> None:
    made = dispatcher(limits(max_inflight=2))
    first, second = run_all(made)
    for _ in range(MAX_FAILURES["environment"] - 1):
        assert made.failed(first.id) == []
        (first,) = run_all(made)
    assert made.failed(first.id) == [second.id]
    assert first.group not in made.open and made.counts["groups_dropped_failed"] == 1


def test_stale_groups_are_dropped_in_every_state() -> None:
    made = dispatcher(limits(off_policy=1))
    jobs = run_all(made)
    for job in jobs[:2]:
        group = made.finished(job.id, rollout(job))
    assert group is not None and made.add_ready(group)
    stale, cancelled, _ = made.apply_age_limit(3)
    assert [g.id for g in stale] == [jobs[0].group] and cancelled == [job.id for job in jobs[2:]]
    assert made.inflight == 0 and made.counts["rollouts_dropped_stale"] == 2 + len(jobs[2:])


def test_rejected_group_is_replaced() -> None:
    made = dispatcher(limits(max_inflight=2, ratios={"a": 1.0}))
    opened = []
    for _ in range(3):
        jobs = run_all(made)
        opened.append(jobs[0].group)
        done = [made.finished(job.id, rollout(job)) for job in jobs][-1]
        assert done is not None
        made.rejected(done, "dull")
    assert opened == ["a-00000000", "a-00000001", "a-00000002"]
    assert made.counts["groups_rejected_dull"] == 3 and made.counts["finished"] == 6
    assert not made.ready and not made.open and not made.unfinished, "their prompts are not sampled again"


def test_restart_opens_unfinished_groups_first() -> None:
    state = {"cursors": {"a": 2}, "unfinished": [("a", 0), ("a", 1)], "taken": {"a-00000000", "a-00000002"}}
    made = dispatcher(limits(max_inflight=2, ratios={"a": 1.0}), **state)
    groups = []
    for _ in range(2):
        jobs = run_all(made)
        groups.append(jobs[0].group)
        for job in jobs:
            done = made.finished(job.id, rollout(job))
        assert done is not None
        made.add_ready(done)
    assert groups == ["a-00000001", "a-00000003"]


def test_unknown_job_is_an_error() -> None:
    with pytest.raises(KeyError):
        dispatcher(limits()).lost("nobody")


def test_rollouts_of_a_lost_replica_move_to_the_others() -> None:
    made = dispatcher(limits())
    jobs = run_all(made)
    lost = [job for job in jobs if job.router == "http://r0"]
    assert lost and len(lost) < len(jobs)
    assert sorted(made.drop_router("http://r0")) == sorted(job.id for job in lost)
    assert made.counts["lost"] == len(lost)
    again = run_all(made)
    assert [job.router for job in again] == ["http://r1"] * len(lost)
    assert {job.group for job in again} == {job.group for job in lost}
    assert made.routers == ("http://r1",)
