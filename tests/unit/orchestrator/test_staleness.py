"""The age limit, stragglers, and the forecast of completions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from primeslurm.orchestrator.algorithms import Grpo
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, Examples
from primeslurm.orchestrator.dispatch.completion_forecast import CompletionForecast, Durations
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.recipe import violations
from primeslurm.recipe.sections.staleness import Staleness
from tests.support.batches import batch_of
from tests.support.clock import Clock
from tests.support.recipes import recipe_data
from tests.unit.orchestrator.test_dispatch import rollout, run_all


def make_dispatcher(
    clock: Clock | None = None, batch: int = 4, inflight: int = 4, off_policy: int = 1, **staleness: object
) -> Dispatcher:
    rules = Staleness(**staleness)  # type: ignore[arg-type]
    limits = DispatchLimits({"a": 4}, batch, inflight, off_policy, 100, {"a": 1.0}, staleness=rules)
    dispatcher = Dispatcher(limits, ["r0"], "run", "i", clock=clock or Clock(0.0))
    dispatcher.version = 0
    return dispatcher


def finish(dispatcher: Dispatcher, jobs: list[Job], version: int = 0) -> RolloutGroup | None:
    groups = [dispatcher.finished(job.id, rollout(job, version)) for job in jobs]
    return groups[-1]


def test_dropped_example_is_sampled_again() -> None:
    dispatcher = make_dispatcher()
    jobs = run_all(dispatcher)
    finish(dispatcher, jobs[:3])
    result = dispatcher.apply_age_limit(3)
    assert result.cancelled == [jobs[3].id] and not result.early
    assert dispatcher.unfinished == [("a", 0)] and dispatcher.counts["examples_returned"] == 1
    dispatcher.version = 2
    again = run_all(dispatcher)
    assert {job.group for job in again} == {jobs[0].group} and not dispatcher.exists(jobs[0].group)
    group = finish(dispatcher, again, 2)
    assert group is not None and dispatcher.exists(group.id), "its new file must not be deleted"
    assert dispatcher.add_ready(group) and dispatcher.exists(group.id)
    dispatcher.step = 3
    assert [group.id for group in dispatcher.take_batch() or []] == [jobs[0].group], "a dropped group's id is free"


def test_batch_waits_for_groups_that_are_being_written() -> None:
    dispatcher, newer = make_dispatcher(rule="partial"), RolloutGroup("a-00000007", "a", 7, 1, ((),) * 4)
    finish(dispatcher, run_all(dispatcher)[:3])
    assert dispatcher.add_ready(newer)
    dispatcher.step = 2
    (early,) = dispatcher.apply_age_limit(2).early
    assert dispatcher.take_batch() is None and not dispatcher.may_form_early(), "no later batch may train it"
    assert dispatcher.add_ready(early) and dispatcher.take_batch() == [early, newer]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("done", [1, 3])
def test_example_is_dropped_only_once(done: int, restarted: bool) -> None:
    dispatcher = make_dispatcher(batch=2)
    run_all(dispatcher)
    assert len(dispatcher.apply_age_limit(3).cancelled) == 4 and dispatcher.returned == [("a", 0)]
    if restarted:
        state = {"cursors": dispatcher.cursors, "unfinished": dispatcher.unfinished, "returned": dispatcher.returned}
        dispatcher = Dispatcher(
            dispatcher.limits, ["r0"], "run", "later", examples=Examples(dispatcher.limits.ratios, **state)
        )
    dispatcher.version = 2
    jobs = run_all(dispatcher)
    finish(dispatcher, jobs[:done], 2)
    early = dispatcher.apply_age_limit(4).early
    dispatcher.version = 5
    result = dispatcher.apply_age_limit(6)
    assert not result.cancelled and dispatcher.inflight == 4 - done and dispatcher.returned == [("a", 0)]
    if done == 1:
        assert not early and [group.version for group in dispatcher.open.values()] == [5], "the group continues"
    else:
        assert [group.size for group in early] == [3] and list(dispatcher.open) == ["a-00000000.1001"]


def test_returned_example_is_recorded_until_its_commit() -> None:
    dispatcher = make_dispatcher()
    run_all(dispatcher)
    dispatcher.apply_age_limit(3)
    dispatcher.version = 2
    group = finish(dispatcher, run_all(dispatcher), 4)
    assert group is not None and dispatcher.add_ready(group)
    dispatcher.step = 5
    state = {"cursors": dispatcher.cursors, "unfinished": dispatcher.unfinished}
    assert dispatcher.take_batch() == [group] and dispatcher.returned == [("a", 0)], "no record has it yet"
    examples = Examples(dispatcher.limits.ratios, returned=dispatcher.returned, **state)
    resumed = Dispatcher(dispatcher.limits, ["r0"], "run", "later", 6, examples=examples)
    assert resumed.add_ready(group), "resumed from the step before, its newest token counts"
    examples = Examples(dispatcher.limits.ratios, taken={group.id}, returned=dispatcher.returned, **state)
    restarted = Dispatcher(dispatcher.limits, ["r0"], "run", "later", 6, examples=examples)
    assert restarted.returned == [("a", 0)]
    dispatcher.return_batch([group])
    assert dispatcher.take_batch() == [group]
    for later in (dispatcher, restarted):
        later.committed({group.id})
        assert later.returned == []


@pytest.mark.parametrize("rule", ["drop", "partial"])
def test_example_that_takes_longer_than_the_age_limit_is_trained(rule: str) -> None:
    """Rollouts of one example take 4 steps, all others one. Groups are fresh for two steps."""
    dispatcher = make_dispatcher(inflight=8, rule=rule)
    jobs: list[Job] = []
    trained: list[str] = []
    while dispatcher.step <= 16:
        jobs = [job for job in jobs if dispatcher.runs(job.id)] + run_all(dispatcher)
        for job in jobs:
            if job.example or dispatcher.version >= job.opened_version + 4:
                done = dispatcher.finished(job.id, rollout(job, dispatcher.version))
                assert done is None or dispatcher.add_ready(done)
        for early in dispatcher.apply_age_limit(dispatcher.step).early:
            dispatcher.add_ready(early)
        trained += [group.id for group in dispatcher.take_batch() or []]
        dispatcher.version += 1
    assert trained.count("a-00000000") == 1 and dispatcher.counts["examples_returned"] == 1
    assert {f"a-{example:08d}" for example in range(10)} <= set(trained)


def test_group_completes_early_at_its_last_chance() -> None:
    dispatcher = make_dispatcher(inflight=8, rule="partial", min_rollouts=2)
    jobs = run_all(dispatcher)
    finish(dispatcher, [*jobs[:3], jobs[4]])
    assert dispatcher.apply_age_limit(2).early == [], "one rollout is too few, and the other group is no batch"
    finish(dispatcher, jobs[5:6])
    assert dispatcher.apply_age_limit(1).early == [], "a later batch may train them"
    first, second = (result := dispatcher.apply_age_limit(2)).early
    assert (first.size, second.size) == (3, 2) and dispatcher.inflight == 0
    assert result.cancelled == [jobs[3].id, *(job.id for job in jobs[6:])]
    dispatcher.step = 2
    assert dispatcher.add_ready(first) and dispatcher.take_batch() is None, "the batch needs four rollouts"
    assert dispatcher.add_ready(second) and dispatcher.take_batch() == [first, second], "the batch is oversized instead"


def test_oversized_batch_is_preferred_to_dropping_a_group() -> None:
    dispatcher = make_dispatcher()
    sizes = {0: 3, 1: 4, 2: 4}
    groups = [
        RolloutGroup(f"a-{n:08d}", "a", n, version, ((),) * size) for n, (version, size) in enumerate(sizes.items())
    ]
    for group in groups:
        assert dispatcher.add_ready(group)
    assert dispatcher.take_batch() == groups[1:2] and dispatcher.step == 2
    assert dispatcher.next_batch() == groups[::2], "although one group of four would suffice"


@pytest.mark.parametrize("done", [2, 3])
def test_running_rollouts_continue_in_another_group(done: int) -> None:
    dispatcher = make_dispatcher(batch=2, rule="carry", min_rollouts=2)
    jobs = run_all(dispatcher)
    finish(dispatcher, jobs[:done])
    dispatcher.version = 1
    (early,) = (result := dispatcher.apply_age_limit(2)).early
    assert early.size == done and not result.cancelled and dispatcher.inflight == 4 - done
    (later,) = dispatcher.open.values()
    assert (later.id, later.version, later.size) == ("a-00000000.1001", 1, 2), "it needs no more than it lacks"
    assert dispatcher.unfinished == [("a", 0)], "the group is not on disk yet"
    assert dispatcher.add_ready(early)
    assert not dispatcher.unfinished, "the example counts as trained"
    more = [job for job in run_all(dispatcher) if job.group == later.id]
    assert len(more) == done - 2, "one rollout alone has no advantage"
    group = finish(dispatcher, [*jobs[done:], *more], 1)
    assert group is not None and group.size == 2 and dispatcher.add_ready(group)
    assert dispatcher.ready.rollouts == done + 2
    assert dispatcher.counts["rollouts_carried"] == 4 - done and dispatcher.counts["cancelled"] == 0


def test_group_with_too_few_finished_rollouts_is_carried_as_a_whole() -> None:
    dispatcher = make_dispatcher(rule="carry", min_rollouts=2)
    jobs = run_all(dispatcher)
    finish(dispatcher, jobs[:1])
    dispatcher.version = 2
    result = dispatcher.apply_age_limit(3)
    assert not result.cancelled and not result.early
    assert [group.version for group in dispatcher.open.values()] == [2]


def test_old_tokens_are_masked() -> None:
    dispatcher = make_dispatcher(rule="mask")
    jobs = run_all(dispatcher)
    finish(dispatcher, jobs[:3], 0)
    dispatcher.version = 5
    assert dispatcher.apply_age_limit(6) == ([], [], [])
    group = finish(dispatcher, jobs[3:], 5)
    assert group is not None and dispatcher.add_ready(group)
    fresh = group.without_older(dispatcher.age_limit.oldest_version(6))
    assert [bool(sequence.mask.any()) for sequence in fresh.sequences] == [False, False, False, True]
    assert dispatcher.apply_age_limit(8).stale == [group], "no token of it would be trained"


@pytest.mark.parametrize("surplus", ["cancel", "carry"])
def test_group_does_not_wait_for_stragglers(surplus: str) -> None:
    dispatcher = make_dispatcher(inflight=6, extra_rollouts=2, surplus=surplus)
    jobs = run_all(dispatcher)
    assert len(jobs) == 6 and len({job.group for job in jobs}) == 1
    group = finish(dispatcher, [jobs[5], *jobs[:3]])
    assert group is not None and [r[0].info.id for r in group.rollouts] == [j.id for j in (*jobs[:3], jobs[5])]
    if surplus == "cancel":
        assert dispatcher.take_surplus_jobs() == [jobs[3].id, jobs[4].id] and dispatcher.take_surplus_jobs() == []
        assert dispatcher.inflight == 0
    else:
        assert dispatcher.take_surplus_jobs() == [] and dispatcher.inflight == 2
        carried = dispatcher.open["a-00000000.1001"]
        assert carried.size == 2 and not carried.to_dispatch


def test_continuation_ids_are_unique_over_restarts() -> None:
    """A restart forgets the ids of committed groups, and opens an example again whose group was not on disk."""
    dispatcher = make_dispatcher(inflight=6, extra_rollouts=2, surplus="carry")
    jobs = run_all(dispatcher)
    assert finish(dispatcher, jobs[:4]) is not None, "the group is not on disk; the carried rollouts are trained"
    (part,) = dispatcher.open
    examples = Examples(dispatcher.limits.ratios, cursors={"a": 1}, unfinished=[("a", 0)])
    later = Dispatcher(dispatcher.limits, ["r0"], "run", "later", 4, examples=examples)
    later.version = 3
    jobs = run_all(later)
    group = finish(later, jobs[:4])
    assert group is not None and group.id == "a-00000000"
    assert len(later.open) == 1 and part not in later.open


def test_slots_are_rollouts_not_groups() -> None:
    """A group that waits for its last rollout occupies one slot."""
    clock = Clock(0.0)
    dispatcher = make_dispatcher(clock, batch=8, inflight=16, off_policy=8)
    stragglers: set[str] = set()
    for _ in range(8):
        jobs = run_all(dispatcher)
        assert dispatcher.inflight == 16
        stragglers |= {job.id for job in {job.group: job for job in jobs}.values()}
        clock.now += 10
        for job in jobs:
            if job.id not in stragglers:
                dispatcher.finished(job.id, rollout(job))
    assert len(dispatcher.open) > 4, "more groups than slots for all their rollouts"


def test_running_rollouts_count_in_the_survival_function() -> None:
    """Halfway through log-normal durations, mostly short rollouts have ended."""
    source = np.random.default_rng(0)
    lengths = source.lognormal(0.0, 1.0, 2000)
    learned = Durations()
    begun = np.sort(source.uniform(0.0, 2.0, 2000))
    for index in range(2000):
        learned.started(str(index), float(begun[index]))
    for index in np.argsort(begun + lengths):
        if begun[index] + lengths[index] <= 3.0:
            learned.ended(str(index), float(begun[index] + lengths[index]), finished=True)
    likely = learned.ending_within([0.0, 0.0, 1.0], 1.0, 3.0)[[0, 2]]
    half = 0.5
    after_one = (lengths <= 2.0)[lengths > 1.0].mean()
    assert likely == pytest.approx([half, after_one], abs=0.05)
    naive = np.mean((lengths <= 1.0)[begun + lengths <= 3.0])
    assert abs(naive - half) > 0.1, "without running rollouts, the estimate is too high"


def test_window_of_durations_covers_long_rollouts() -> None:
    """50 rollouts start per second; half take 50 s, half 150 s. 5,000 run at once."""
    learned = Durations()
    events = [(index / 50 + took, index, took) for index in range(30_000) for took in (0, 150 if index % 2 else 50)]
    for now, index, took in sorted(event for event in events if event[0] < 600):
        if took:
            learned.ended(str(index), now, finished=True)
        else:
            learned.started(str(index), now)
    assert learned.ending_within([0.0, 49.0, 100.0, 149.0], 10.0, 600.0) == pytest.approx([0, 0.5, 0, 1], abs=0.05)


def test_forecast_is_zero_before_any_rollout_ended() -> None:
    learned = Durations()
    learned.started("a", 0.0)
    assert learned.ending_within([5.0, 0.0], 1e9, 5.0).tolist() == [0.0, 0.0]


def test_cold_start_fills_the_engines() -> None:
    clock = Clock(0.0)
    dispatcher = make_dispatcher(clock, batch=4, inflight=16, off_policy=8)
    assert len(run_all(dispatcher)) == 16, "the first rollouts do not have to end first"
    for _ in range(50):  # rollouts of one second, and no request of the trainer
        clock.now += 1
        for group in list(dispatcher.open.values()):
            for name in list(group.jobs):
                done = dispatcher.finished(name, rollout(Job(name, group.id, "a", 0, 0, "r0", "s")))
                if done is not None:
                    dispatcher.add_ready(done)
        run_all(dispatcher)
    assert dispatcher.ready.rollouts == 16 and not dispatcher.open, "those that started before the forecast"


@pytest.mark.parametrize("rule", ["drop", "mask", "partial", "carry"])
def test_batch_trains_no_old_token(rule: str) -> None:
    fields = {"batch_size": 4, "group_size": 4, "max_off_policy_steps": 1, "staleness": {"rule": rule}}
    recipe = Recipe.model_validate(recipe_data(environments=[{"id": "a"}], orchestrator=fields))
    jobs = [Job(f"a-00000000/{n}-i", "a-00000000", "a", 0, 0, "r0", "s") for n in range(4)]
    rollouts = tuple(rollout(job, version) for job, version in zip(jobs, [0, 3, 3, 4], strict=True))
    batches = Batches(recipe, Grpo())
    batches.add(6, [RolloutGroup("a-00000000", "a", 0, 4, rollouts)])
    batch = batch_of(batches, 6)
    assert batch is not None and batch.info.loss_tokens == 1, "each rollout has two tokens, and the first has no loss"


def test_min_rollouts_above_the_group_size_is_refused() -> None:
    fields: dict[str, Any] = {"batch_size": 8, "group_size": 4, "staleness": {"rule": "partial", "min_rollouts": 5}}
    (violation,) = violations(Recipe.model_validate(recipe_data(orchestrator=fields)))
    assert (violation.field, violation.fix) == ("orchestrator.staleness.min_rollouts", "nearest: 4")
    fields["staleness"] = {"rule": "drop", "min_rollouts": 5}
    assert not violations(Recipe.model_validate(recipe_data(orchestrator=fields)))


@pytest.mark.parametrize("rule", ["drop", "partial", "carry", "mask"])
def test_batch_forms_early_without_known_step_time_only_if_nothing_is_lost(rule: str) -> None:
    dispatcher = make_dispatcher(inflight=8, rule=rule)
    jobs = run_all(dispatcher)
    assert len(jobs) == 8 and not dispatcher.may_form_early(), "no group is complete"
    group = finish(dispatcher, jobs[:4])
    assert group is not None and dispatcher.add_ready(group)
    assert dispatcher.may_form_early(), "the next batch may train the other group"
    dispatcher.step = 2
    assert dispatcher.may_form_early() == (rule == "mask"), "this batch is the last chance of the other group"
    other = finish(dispatcher, jobs[4:])
    assert other is not None and dispatcher.add_unscored(other)
    assert not dispatcher.may_form_early(), "a group at the teacher would be lost"
    assert dispatcher.scored(other) and dispatcher.may_form_early()


@pytest.mark.parametrize("rule", ["drop", "partial", "carry"])
def test_batch_forms_early_if_its_last_groups_will_not_finish_in_time(rule: str) -> None:
    """Rollouts take 10, 30 or 50 s, a step of the trainer 30 s."""
    dispatcher = make_dispatcher(clock := Clock(0.0), inflight=8, rule=rule)

    def ends(jobs: list[Job], at: float, version: int = 0) -> RolloutGroup | None:
        clock.now = at
        return finish(dispatcher, jobs, version)

    def cuts(group: RolloutGroup | None) -> None:
        assert group is not None and dispatcher.add_ready(group) and dispatcher.take_batch() == [group]

    jobs = run_all(dispatcher)
    cuts(ends(jobs[:4], 10))
    assert ends(jobs[4:6], 30) is None
    clock.now = 40
    dispatcher.step_done()
    group = ends(jobs[6:], 50)
    assert group is not None
    dispatcher.rejected(group, "learned from")
    dispatcher.version = 1
    jobs = run_all(dispatcher)
    cuts(ends(jobs[:4], 60, 1))
    dispatcher.version = 2
    group = ends(run_all(dispatcher), 65, 2)
    assert group is not None and dispatcher.add_ready(group) and len(dispatcher.open) == 1
    assert not dispatcher.may_form_early(), "half of the rollouts that run for 15 s end within 25 s"
    clock.now = 85
    assert dispatcher.may_form_early(), "no rollout that runs for 35 s ends within 5 s"


def test_step_of_an_early_batch_starts_when_the_previous_one_ends() -> None:
    ahead = CompletionForecast(["a"], clock := Clock(0.0))
    ahead.batch_formed()
    clock.now = 5.0
    ahead.batch_formed(early=True)
    assert ahead.early_batches == 1
    clock.now = 10.0
    ahead.step_done()
    assert ahead.early_batches == 0 and ahead.horizon_s == 10.0
    clock.now = 14.0
    ahead.step_done()
    ahead.step_done()
    assert ahead.horizon_s == 7.0, "the median of 10 s and 4 s; the batch of the third step is unknown"
    ahead.batch_formed(early=True)
    assert ahead.early_batches == 0, "the trainer has no other batch"
    ahead.batch_returned()
    ahead.step_done()
    assert ahead.horizon_s == 7.0
