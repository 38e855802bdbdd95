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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits, group_id
from primeslurm.orchestrator.dispatch.limits import choose
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.staleness import Staleness
from tests.unit.orchestrator.test_dispatch import rollout

pytestmark = pytest.mark.usefixtures("unmeasured")

relaxed = settings(deadline=None)


@relaxed
@given(sizes=st.lists(st.integers(1, 6), max_size=9), total=st.integers(1, 24))
def test_choice_is_the_smallest_sum_of_the_first_groups(sizes: list[int], total: int) -> None:
    enough = [
        (sum(sizes[index] for index in chosen), chosen)
        for count in range(len(sizes) + 1)
        for chosen in itertools.combinations(range(len(sizes)), count)
        if sum(sizes[index] for index in chosen) >= total
    ]
    choice = choose(sizes, total)
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
    at_least=st.integers(1, 3),
    extra_rollouts=st.integers(0, 2),
    surplus=st.sampled_from(["cancel", "carry"]),
)
CHAINS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3).map(
    lambda factors: list(itertools.accumulate(factors, operator.mul))
)


@settings(deadline=None, max_examples=40)
@given(
    sizes=CHAINS,
    batches=st.integers(1, 3),
    off_policy=st.integers(0, 3),
    oversampling=st.sampled_from([1.0, 1.5, 4.0]),
    staleness=RULES,
    seed=st.integers(0, 2**16),
)
@example([2, 6], 3, 0, 1.0, Staleness(rule="carry", at_least=2, extra_rollouts=1), 26)  # two groups of one example
@example([1, 3], 3, 0, 1.5, Staleness(rule="carry", at_least=1, extra_rollouts=1), 21)  # complete at once
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
    made = Dispatcher(limits, ["r0"], "run", "i")
    made.version = 0
    running, opened, used, left_out, again = {}, set(), [], set(), set()
    for _ in range(1000 + 200 * batch_size):
        if made.step > STEPS:
            break
        while job := made.next_job(set(labels)):
            running[job.id] = job
            opened.add(job.group)
        assert made.inflight <= limits.max_inflight
        running = {name: job for name, job in running.items() if made.runs(name)}
        live = list(running.values())
        event = source.random()
        if live and event < 0.75:
            job = source.choice(live)
            group = made.finished(job.id, rollout(job, made.version))
            assert not any(made.runs(name) for name in made.take_surplus_jobs())
            if group and source.random() < 0.2:
                made.rejected(group, "dull")
                left_out.add(group.id)
            elif group:
                made.add_ready(group)
        elif live and event < 0.8:
            made.lost(source.choice(live).id)
        elif live and event < 0.85:
            before = set(made.open)
            made.failed(source.choice(live).id)
            left_out |= before - made.open.keys()
        elif event < 0.95 or not live:
            step = made.step
            swept = made.apply_age_limit(step)
            again |= {first(group.id) for group in swept.stale}
            for group in swept.early:
                most = max(limits.group_sizes[group.environment], staleness.extra_rollouts)
                assert staleness.at_least <= group.size < most
                made.add_ready(group)
            batch, returned = made.next_batch(), made.returned
            assert (made.take_batch() or []) == batch
            oldest = step - 1 - off_policy
            ages = [age(group, staleness, returned) for group in batch]
            assert min(ages, default=oldest) >= oldest
            used += batch
            if batch:
                more = sum(group.size for group in batch) - batch_size
                assert 0 <= more < max(group.size for group in batch)
                smaller = staleness.rule in ("partial", "carry") or staleness.surplus == "carry"
                smaller |= made.counts["examples_returned"] > 0  # an example is dropped only once
                assert not more or smaller or oldest in ages, "whole groups fill it, unless one is at its last chance"
            made.version = made.step - 1
        ends = sum(made.counts[how] for how in ("finished", "failed", "cancelled", "lost"))
        assert made.counts["dispatched"] == ends + made.inflight
    assert made.step == STEPS + 1
    names = [group.id for group in used]
    assert len(names) == len(set(names))
    waiting = {group.id for group in made.ready} | {group_id(*position) for position in made.unfinished}
    begun, ruled_out = ({first(name) for name in ids} for ids in (opened, left_out))
    assert begun - ruled_out <= {first(name) for name in names} | waiting
    assert not set(names) & waiting, "no example is lost or trained twice"
    rollouts = [sequence.info.id for group in used for sequence in group.sequences]
    assert len(rollouts) == len(set(rollouts)), "no rollout is trained twice"
    if staleness.rule == "carry":
        for name in {first(name) for name in names} - again:
            size = limits.group_sizes[name.rpartition("-")[0]]
            mine = [group.size for group in used if first(group.id) == name]
            filled_up = (len(mine) - 1) * (min(size, staleness.at_least) - 1)
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
        made = Dispatcher(self.limits, [f"r{index}" for index in range(4)], "run", "i")
        made.version = 0
        events: list[tuple[float, str, str]] = []
        jobs = {}
        idle_since: float | None = 0.0
        while len(self.batches) < steps:
            while job := made.next_job(set(self.limits.ratios)):
                jobs[job.id] = job
                heapq.heappush(events, (self.now + 300 * source.lognormvariate(0, 0.8), "rollout", job.id))
            self.inflight.append(made.inflight)
            if idle_since is not None:
                step = made.step
                self.apply_age_limit(made)
                if (groups := made.take_batch()) is not None:
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
                self.apply_age_limit(made)
                made.version = made.step - 1
            elif made.runs(name):
                group = made.finished(name, rollout(jobs.pop(name)))
                if group and source.random() < self.reject:
                    made.rejected(group, "zero_advantage")
                elif group:
                    made.add_ready(group)
        return made

    def apply_age_limit(self, made: Dispatcher) -> None:
        for group in made.apply_age_limit(made.step).early:
            made.add_ready(group)


def flagship(off_policy: int = 8, **changes: float) -> DispatchLimits:
    """Return limits with 512 rollouts in flight, batches of 256, and groups of 8 and 16."""
    oversampling = changes.get("oversampling", 1.0)
    return DispatchLimits({"a": 8, "b": 16}, 256, 512, off_policy, 10_000, {"a": 1.0, "b": 1.0}, oversampling)


def test_flagship_batches_are_full_fresh_and_fair() -> None:
    made = Simulation(flagship(), step_s=100.0)
    made.run(60)
    sizes = [sum(batch.values()) for batch in made.batches]
    assert all(256 <= size < 256 + 16 for size in sizes), "oversized by less than a group"
    assert sum(sizes) < 1.01 * 256 * len(sizes)
    total = sum(made.batches, Counter())
    assert 0.47 < total["b"] / 16 / (total["a"] / 8 + total["b"] / 16) < 0.53, "ratios count groups"
    assert max(made.staleness) <= 8
    assert max(made.inflight) == 512


def test_flagship_on_policy_trains_no_old_group() -> None:
    made = Simulation(flagship(off_policy=0))
    end = made.run(30)
    assert set(made.staleness) == {0} and all(sum(batch.values()) == 256 for batch in made.batches)
    assert end.counts["groups_dropped_stale"] == 0, "no group became too old"


def test_oversampling_shortens_the_wait_for_batches() -> None:
    plain = Simulation(flagship(off_policy=0), reject=0.5)
    plain.run(30)
    more = Simulation(flagship(off_policy=0, oversampling=2.0), reject=0.5)
    more.run(30)
    assert more.waited < 0.8 * plain.waited
    assert set(more.staleness) == {0}
