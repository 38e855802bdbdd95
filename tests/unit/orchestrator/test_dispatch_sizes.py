"""Batches of groups of different sizes, also at the scale of real runs."""

from __future__ import annotations

import heapq
import itertools
import operator
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, group_id
from primeslurm.orchestrator.dispatch.limits import choose_groups
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.staleness import Staleness
from tests.unit.orchestrator.test_dispatch import rollout

pytestmark = pytest.mark.usefixtures("unmeasured")


@given(sizes=st.lists(st.integers(1, 6), max_size=9), total=st.integers(1, 24))
def test_choice_is_the_smallest_sum_of_the_first_groups(sizes: list[int], total: int) -> None:
    enough = [
        (sum(sizes[index] for index in chosen), chosen)
        for count in range(len(sizes) + 1)
        for chosen in itertools.combinations(range(len(sizes)), count)
        if sum(sizes[index] for index in chosen) >= total
    ]
    choice = choose_groups(sizes, total)
    assert choice == (list(min(enough)[1]) if enough else []), "the smallest sum, and the smallest indices"


def test_group_opens_for_a_batch_that_lacks_less_than_a_group() -> None:
    limits = DispatchLimits({"a": 4, "b": 8}, 16, 99, 0, 1, {"a": 1.0, "b": 1.0})

    def may_open(ready: int) -> list[str]:
        return [label for label in "ab" if limits.may_open(label, 1, 0, ready, 0, 0.0)]

    assert may_open(8) == ["a", "b"] and may_open(12) == ["a"], "the group fits the batch"
    assert may_open(13) == ["a", "b"], "no group fits, but the batch must fill"
    assert may_open(16) == [], "the batch is full, and the next one is too late"


STEPS = 8
RULES = st.builds(
    Staleness,
    rule=st.sampled_from(["drop", "mask", "partial", "carry"]),
    min_rollouts=st.integers(1, 3),
    extra_rollouts=st.integers(0, 2),
    surplus=st.sampled_from(["cancel", "carry"]),
)
CHAINS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3).map(
    lambda factors: list(itertools.accumulate(factors, operator.mul))
)


@given(
    sizes=CHAINS,
    batches=st.integers(1, 3),
    off_policy=st.integers(0, 3),
    oversampling=st.sampled_from([1.0, 1.5, 4.0]),
    staleness=RULES,
    seed=st.integers(0, 2**16),
)
@example([2, 6], 3, 0, 1.0, Staleness(rule="carry", min_rollouts=2, extra_rollouts=1), 26)  # two groups of one example
@example([1, 3], 3, 0, 1.5, Staleness(rule="carry", min_rollouts=1, extra_rollouts=1), 21)  # complete at once
def test_batches_form_under_any_order_of_events(
    sizes: list[int], batches: int, off_policy: int, oversampling: float, staleness: Staleness, seed: int
) -> None:
    """Batches are full and fresh, and no group, rollout or example is lost or repeated."""
    labels = [f"e{index}" for index in range(len(sizes))]
    source, batch_size = random.Random(seed), sizes[-1] * batches
    limits = DispatchLimits(
        dict(zip(labels, sizes, strict=True)),
        batch_size,
        source.randint(sizes[-1], 3 * batch_size),
        off_policy,
        STEPS,
        {label: source.choice([0.5, 1.0, 3.0]) for label in labels},
        oversampling,
        staleness,
    )
    dispatcher = Dispatcher(limits, ["r0"], "run", "i")
    dispatcher.version = 0
    running, opened, used, left_out, again = {}, set(), [], set(), set()
    for _ in range(1000 + 200 * batch_size):
        if dispatcher.step > STEPS:
            break
        while job := dispatcher.next_job(set(labels)):
            running[job.id] = job
            opened.add(job.group)
        assert dispatcher.inflight <= limits.max_inflight
        running = {name: job for name, job in running.items() if dispatcher.runs(name)}
        live = list(running.values())
        event = source.random()
        if live and event < 0.75:
            job = source.choice(live)
            group = dispatcher.finished(job.id, rollout(job, dispatcher.version))
            assert not any(dispatcher.runs(name) for name in dispatcher.take_surplus_jobs())
            if group and source.random() < 0.2:
                dispatcher.rejected(group, "dull")
                left_out.add(group.id)
            elif group:
                dispatcher.add_ready(group)
        elif live and event < 0.8:
            dispatcher.lost(source.choice(live).id)
        elif live and event < 0.85:
            before = set(dispatcher.open)
            dispatcher.failed(source.choice(live).id)
            left_out |= before - dispatcher.open.keys()
        elif event < 0.95 or not live:
            step = dispatcher.step
            result = dispatcher.apply_age_limit(step)
            again |= {first(group.id) for group in result.stale}
            for group in result.early:
                most = max(limits.group_sizes[group.environment], staleness.extra_rollouts)
                assert staleness.min_rollouts <= group.size < most
                dispatcher.add_ready(group)
            batch, returned = dispatcher.next_batch(), dispatcher.returned
            assert (dispatcher.take_batch() or []) == batch
            oldest = step - 1 - off_policy
            ages = [age(group, staleness, returned) for group in batch]
            assert min(ages, default=oldest) >= oldest
            used += batch
            if batch:
                more = sum(group.size for group in batch) - batch_size
                assert 0 <= more < max(group.size for group in batch)
                smaller = staleness.rule in ("partial", "carry") or staleness.surplus == "carry"
                smaller |= dispatcher.counts["examples_returned"] > 0  # an example is dropped only once
                assert not more or smaller or oldest in ages, "whole groups fill it, unless one is at its last chance"
            dispatcher.version = dispatcher.step - 1
        ends = sum(dispatcher.counts[how] for how in ("finished", "failed", "cancelled", "lost"))
        assert dispatcher.counts["dispatched"] == ends + dispatcher.inflight
    assert dispatcher.step == STEPS + 1
    names = [group.id for group in used]
    assert len(names) == len(set(names))
    waiting = {group.id for group in dispatcher.ready} | {group_id(*position) for position in dispatcher.unfinished}
    begun, ruled_out = ({first(name) for name in ids} for ids in (opened, left_out))
    assert begun - ruled_out <= {first(name) for name in names} | waiting
    assert not set(names) & waiting, "no example is lost or trained twice"
    rollouts = [sequence.info.id for group in used for sequence in group.sequences]
    assert len(rollouts) == len(set(rollouts)), "no rollout is trained twice"
    if staleness.rule == "carry":
        for name in {first(name) for name in names} - again:
            size = limits.group_sizes[name.rpartition("-")[0]]
            mine = [group.size for group in used if first(group.id) == name]
            filled_up = (len(mine) - 1) * (min(size, staleness.min_rollouts) - 1)
            extra = staleness.extra_rollouts if staleness.surplus == "carry" else 0
            assert sum(mine) <= size + extra + filled_up, "no example is trained more than others"


def age(group: RolloutGroup, staleness: Staleness, returned: Collection[tuple[str, int]]) -> int:
    """Return the version from which the age of a group counts."""
    goes_on = "." in group.id or (group.environment, group.example) in returned
    return group.newest_version if staleness.counts_tokens or goes_on else group.opened_version


def first(name: str) -> str:
    """Return the id of the first group of an example."""
    return name.partition(".")[0]


@dataclass
class Simulation:
    """A run on a simulated clock, with long-tailed rollouts, a trainer and weight updates."""

    limits: DispatchLimits
    seed: int = 0
    step_s: float = 600.0
    reject: float = 0.0
    """Share of the groups that a filter rejects."""
    now: float = 0.0
    waited: float = 0.0
    """Seconds that the trainer waited for batches, the first aside."""
    staleness: Counter[int] = field(default_factory=Counter)
    inflight: list[int] = field(default_factory=list)
    batches: list[Counter[str]] = field(default_factory=list)

    def run(self, steps: int) -> Dispatcher:
        source = random.Random(self.seed)
        dispatcher = Dispatcher(self.limits, [f"r{index}" for index in range(4)], "run", "i")
        dispatcher.version = 0
        events: list[tuple[float, str, str]] = []
        jobs = {}
        idle_since: float | None = 0.0
        while len(self.batches) < steps:
            while job := dispatcher.next_job(set(self.limits.ratios)):
                jobs[job.id] = job
                heapq.heappush(events, (self.now + 300 * source.lognormvariate(0, 0.8), "rollout", job.id))
            self.inflight.append(dispatcher.inflight)
            if idle_since is not None:
                step = dispatcher.step
                self.apply_age_limit(dispatcher)
                if (groups := dispatcher.take_batch()) is not None:
                    self.staleness.update(step - 1 - group.opened_version for group in groups)
                    self.batches.append(Counter())
                    for group in groups:
                        self.batches[-1][group.environment] += len(group.rollouts)
                    self.waited += self.now - idle_since if step > 1 else 0.0
                    idle_since = None
                    heapq.heappush(events, (self.now + self.step_s, "trained", ""))
                    continue
            self.now, kind, name = heapq.heappop(events)
            if kind == "trained":
                idle_since = self.now
                self.apply_age_limit(dispatcher)
                dispatcher.version = dispatcher.step - 1
            elif dispatcher.runs(name):
                group = dispatcher.finished(name, rollout(jobs.pop(name)))
                if group and source.random() < self.reject:
                    dispatcher.rejected(group, "zero_advantage")
                elif group:
                    dispatcher.add_ready(group)
        return dispatcher

    def apply_age_limit(self, dispatcher: Dispatcher) -> None:
        for group in dispatcher.apply_age_limit(dispatcher.step).early:
            dispatcher.add_ready(group)


def flagship(off_policy: int = 8, **changes: float) -> DispatchLimits:
    """Return limits with 512 rollouts in flight, batches of 256, and groups of 8 and 16."""
    oversampling = changes.get("oversampling", 1.0)
    return DispatchLimits({"a": 8, "b": 16}, 256, 512, off_policy, 10_000, {"a": 1.0, "b": 1.0}, oversampling)


def test_flagship_batches_are_full_fresh_and_fair() -> None:
    dispatcher = Simulation(flagship(), step_s=100.0)
    dispatcher.run(60)
    sizes = [sum(batch.values()) for batch in dispatcher.batches]
    assert all(256 <= size < 256 + 16 for size in sizes), "oversized by less than a group"
    assert sum(sizes) < 1.01 * 256 * len(sizes)
    total = sum(dispatcher.batches, Counter())
    assert 0.47 < total["b"] / 16 / (total["a"] / 8 + total["b"] / 16) < 0.53, "ratios count groups"
    assert max(dispatcher.staleness) <= 8
    assert max(dispatcher.inflight) == 512


def test_flagship_on_policy_trains_no_old_group() -> None:
    dispatcher = Simulation(flagship(off_policy=0))
    end = dispatcher.run(30)
    assert set(dispatcher.staleness) == {0} and all(sum(batch.values()) == 256 for batch in dispatcher.batches)
    assert end.counts["groups_dropped_stale"] == 0, "no group became too old"


def test_oversampling_shortens_the_wait_for_batches() -> None:
    plain = Simulation(flagship(off_policy=0), reject=0.5)
    plain.run(30)
    more = Simulation(flagship(off_policy=0, oversampling=2.0), reject=0.5)
    more.run(30)
    assert more.waited < 0.8 * plain.waited
    assert set(more.staleness) == {0}
