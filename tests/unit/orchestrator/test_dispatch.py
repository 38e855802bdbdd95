"""The dispatcher: which groups open, which jobs run, how groups end, and the order and age of examples."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from primeslurm.orchestrator.dispatch import MAX_FAILURES, Dispatcher, DispatchLimits, Examples
from primeslurm.orchestrator.dispatch.completion_forecast import REFRESH_S, CompletionForecast
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, OpenGroups, ReadyGroups, group_id
from primeslurm.orchestrator.dispatch.staleness import AgeLimit
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe.sections.staleness import Staleness
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


@pytest.mark.parametrize(
    ("off_policy", "max_steps", "jobs"),
    [
        pytest.param(0, 50, 4, id="only step 1 may train a group of version 0"),
        pytest.param(2, 50, 12, id="so may steps 2 and 3"),
        pytest.param(8, 2, 8, id="step 2 is the last one"),
    ],
)
def test_no_group_opens_that_no_step_may_train(off_policy: int, max_steps: int, jobs: int) -> None:
    assert len(run_all(make_dispatcher(limits(off_policy, max_inflight=100, max_steps=max_steps)))) == jobs


def test_slow_trainer_gets_no_long_queue() -> None:
    dispatcher = make_dispatcher(limits(off_policy=8, max_inflight=4))
    for _ in range(10):
        for job in run_all(dispatcher):
            if done := dispatcher.finished(job.id, rollout(job)):
                dispatcher.add_ready(done)
    assert len(dispatcher.ready) == 4, "two batches, although eight would be fresh"


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


def group(example: int, version: int, environment: str = "a", size: int = 4) -> OpenGroup:
    return OpenGroup(group_id(environment, example), environment, example, version, "r", size, list(range(size)), None)


@pytest.mark.parametrize("seed", range(20))
def test_open_groups_agree_with_a_full_scan(seed: int) -> None:
    source, groups = random.Random(seed), OpenGroups()
    for example in range(300):
        action = source.choice(["add", "add", "take", "take", "take", "again", "grow", "version", "remove"])
        present = list(groups.values())
        if action == "add" or not present:
            groups.add(group(example, source.randrange(5), source.choice("ab"), source.choice((2, 4))))
        elif action == "take":
            next_group = groups.next(source.choice(({"a"}, {"b"}, {"a", "b"})))
            if next_group is not None:
                next_group.jobs[f"{next_group.id}/{example}"] = groups.take(next_group)
        elif action == "again" and (busy := [each for each in present if each.jobs]):
            lost = source.choice(busy)
            groups.redispatch(lost, lost.jobs.popitem()[1])
        elif action == "grow":
            groups.grow(source.choice(present))
        elif action == "version":
            groups.set_version(source.choice(present), source.randrange(5))
        elif action == "remove":
            groups.remove(source.choice(present))
        for labels in ({"a"}, {"b"}, {"a", "b"}):
            first = next((each for each in groups.values() if each.to_dispatch and each.environment in labels), None)
            assert groups.next(labels) is first
        for oldest in range(6):
            assert groups.pending(oldest) == sum(each.size for each in groups.values() if each.version >= oldest)
            assert groups.before(oldest) == [each for each in groups.values() if each.version < oldest]
            assert groups.at(oldest) == sum(each.size for each in groups.values() if each.version == oldest)


def test_incremental_forecast_agrees_with_a_refresh() -> None:
    source, now = random.Random(1), 0.0
    ahead, groups = CompletionForecast(["a", "b"], lambda: now), OpenGroups()
    for example in range(400):
        now += 0.01
        new = group(example, 0, source.choice("ab"))
        groups.add(new)
        ahead.opened(new)
        for index in new.to_dispatch[:3]:
            new.jobs[f"{new.id}/{index}"] = index
            ahead.started(new, f"{new.id}/{index}")
        if example > 20:
            gone = source.choice(list(groups.values()))
            for job in gone.jobs:
                ahead.ended(gone, job, finished=True)
            groups.remove(gone)
            ahead.closed(gone)
        ahead.batch_formed()
        now += 0.001
        ahead.step_done()
        incremental = ahead.landing(groups)
        if example % 50 == 49:
            now += REFRESH_S
            assert ahead.landing(groups) >= 0
            again = ahead.landing(groups)
            assert again == pytest.approx(sum(ahead._landing[name] for name in groups)), "closed groups do not count"
            assert set(ahead._landing) == set(groups)
        assert incremental == pytest.approx(sum(ahead._landing.values()))


@pytest.mark.parametrize("seed", range(5))
def test_ready_groups_agree_with_a_full_scan(seed: int) -> None:
    source = random.Random(seed)
    ready = ReadyGroups(lambda each: each.opened_version)
    for example in range(200):
        rollouts = ((),) * source.choice((2, 4))
        new = RolloutGroup(group_id("a", example), "a", example, source.randrange(5), rollouts)
        action, some = source.choice(["add", "add", "take", "put back", "replace"]), [*ready][:2]
        if action == "add" or not some:
            ready.add(new)
        elif action == "take":
            ready.remove(some)
        elif action == "put back":
            ready.remove(some)
            ready.put_back(some)
            assert [*ready][: len(some)] == some
        else:
            other = replace(some[0])
            ready.replace(some[0], other)
            assert next(iter(ready)) is other
        assert ready.rollouts == sum(each.size for each in ready)
        for version in range(6):
            assert ready.before(version) == [each for each in ready if each.opened_version < version]
    ready.sort()
    assert [each.opened_version for each in ready] == sorted(each.opened_version for each in ready)


RATIOS = {"a": 1.0, "b/c": 3.0}


def test_unfinished_examples_come_first_then_the_environment_behind_its_share() -> None:
    made = Examples(RATIOS, cursors={"a": 2}, unfinished=[("a", 1), ("gone", 0)], taken={"a-00000002"})
    assert [made.take_next(["a", "b/c"]) for _ in range(5)] == [
        ("a", 1),
        *(("b/c", example) for example in range(3)),
        ("b/c", 3),
    ]
    assert [made.take_next(labels) for labels in (["a"], [])] == [("a", 3), None], "example 2 is taken"


def test_given_up_example_is_sampled_again_with_its_task() -> None:
    made = Examples(RATIOS, cursors={"a": 3}, taken={"a-00000001"})
    assert not made.is_unopened(("a", 1)) and made.is_unopened(("a", 3))
    assert made.sample_again(("a", 1), 7) and not made.sample_again(("a", 1), 7)
    assert made.is_unopened(("a", 1)) and made.was_returned(("a", 1))
    assert made.take_next(["a"]) == ("a", 1) and made.take_task(("a", 1), set()) == 7
    assert made.take_task(("a", 1), set()) is None, "there is no curriculum"
    assert made.returned([]) == [] and made.returned([("a", 1)]) == [("a", 1)]
    made.put_in_batch({"a-00000001"})
    assert made.returned([]) == [("a", 1)]
    made.forget_batch({"a-00000001"})
    assert made.returned([]) == []


def test_position_is_found_from_a_file_name() -> None:
    made = Examples(RATIOS, cursors={"b/c": 2})
    assert made.position_of_file("b_c-00000001") == ("b/c", 1) == made.position_of_file("b/c-00000001")
    assert [made.position_of_file(name) for name in ("b_c-00000002", "c-00000001", "b_c-x", "")] == [None] * 4


def test_positions_before_an_adopted_one_stay_unfinished() -> None:
    made = Examples(RATIOS, cursors={"a": 1})
    made.mark_opened(("a", 3))
    assert (made.cursors["a"], made.unfinished) == (4, [("a", 1), ("a", 2)])
    made.mark_opened(("a", 1))
    assert made.unfinished == [("a", 2)]


JOB = Job("a-00000000/0-i", "a-00000000", "a", 0, 3, "r0", "s")
GROUP = RolloutGroup("a-00000000", "a", 0, 3, (rollout(JOB, 3), rollout(JOB, 5)))
"""Opened at version 3; version 5 sampled its newest token."""


@pytest.mark.parametrize(("rule", "version"), [("drop", 3), ("partial", 3), ("mask", 5), ("carry", 5)])
def test_group_may_be_trained_until_its_version_is_too_old(rule: str, version: int) -> None:
    limit = AgeLimit(2, Staleness(rule=rule))
    last = version + 2 + 1
    assert limit.version_of(GROUP) == version and limit.oldest_version(last) == version
    assert [limit.is_last_chance(GROUP, step) for step in (last - 1, last, last + 1)] == [False, True, True]
    assert [limit.is_too_old(GROUP, step) for step in (last, last + 1)] == [False, True]


def test_continuations_and_returned_examples_finish_late() -> None:
    limit = AgeLimit(2, was_returned={("a", 1)}.__contains__)
    assert not limit.finishes_late("a", 0, "a-00000000") and limit.version_of(GROUP) == 3
    assert limit.finishes_late("a", 0, "a-00000000.1001") and limit.finishes_late("a", 1, "a-00000001")
    assert limit.version_of(replace(GROUP, id="a-00000000.1001")) == 5, "its newest token counts"
