"""How full the dispatcher keeps the engines under a long tail, with a simulated clock.

Durations of rollouts are log-normal with a median of ten minutes. A trainer step takes four minutes. Engines run as
many rollouts as may be in flight, without slowing down. Measured after a warm-up: the mean share of slots in use; the
step time relative to the bound (the faster of engines or trainer limits it); the share of rollouts that are discarded;
rollouts per batch. If half of the variance belongs to the example: how many of the started examples were trained, of
the longest third and of all, and in how many groups, of the shortest and of the longest third.

    python -m benchmarks dispatch [--large] [--write] [--resume]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, get_args

import numpy as np

from primeslurm.base.files import write_json
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits
from primeslurm.orchestrator.dispatch.group_queues import ReadyGroups
from primeslurm.orchestrator.dispatch.staleness import AgeLimit
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe.sections.staleness import Staleness, StaleRule, SurplusRule
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "dispatch.json"
MEDIAN_S, TRAINER_S = 600.0, 240.0
GROUP = 16
STALENESS = 8
"""In policy versions."""
WARM_UP, STEPS = 12, 40
SETTLED = 24
"""Steps after which an example should have been trained even if it was dropped once; at most half of all steps."""
SIGMAS = (0.3, 0.6, 1.0, 1.3)
SETTING = ("inflight", "sigma", "rule", "shared", "extra_rollouts", "surplus", "steps")
"""Columns of a result row that describe the setting."""
LARGE, LARGE_STEPS = 10_000, 12
LARGE_SIGMAS = (1.0, 1.3, 0.3, 0.6)
"""Long tails first."""
TOKENS = np.ones(2, np.int32)


@dataclass
class World:
    """Simulates rollouts that take their time, and a trainer that requests batches."""

    limits: DispatchLimits
    sigma: float
    shared: float
    """Share of the variance of log durations that belongs to the example."""
    kind: type[Dispatcher] = Dispatcher
    now: float = 0.0
    _events: list[tuple[float, int, Job | None]] = field(default_factory=list)
    _serial: int = 0
    in_use_s: float = 0.0
    steps: list[float] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)
    """Step in which each example was started."""
    trained: Counter[str] = field(default_factory=Counter)
    """Number of trained groups per example."""
    trained_rollouts: Counter[str] = field(default_factory=Counter)
    """Number of trained rollouts per example."""
    counted_from: float = 0.0

    def __post_init__(self) -> None:
        self.dispatch = self.kind(self.limits, ["r"], "s", "i", clock=lambda: self.now)

    def duration(self, job: Job) -> float:
        """Return the duration of a rollout [s], from its example's and its own part."""
        own = random.Random(job.id).gauss(0, 1)
        deviation = math.sqrt(self.shared) * difficulty(job.group.partition(".")[0]) + math.sqrt(1 - self.shared) * own
        return MEDIAN_S * math.exp(self.sigma * deviation)

    def run(self, steps: int) -> None:
        """Simulate this many steps."""
        self.dispatch.version = 0
        waiting = True
        while len(self.steps) < steps:
            while job := self.dispatch.next_job({"e"}):
                self.begun.setdefault(job.group.partition(".")[0], len(self.steps))
                self._push(self.now + self.duration(job), job)
            if waiting and self._cut():
                waiting = False
                self._push(self.now + TRAINER_S, None)
                continue
            at, _, job = heapq.heappop(self._events)
            if len(self.steps) >= WARM_UP:
                self.counted_from = self.counted_from or self.now
                self.in_use_s += self.dispatch.inflight * (at - self.now)
            self.now = at
            if job is None:
                self.dispatch.version += 1
                waiting = True
                self.dispatch.step_done()
            elif self.dispatch.runs(job.id):
                self._finish(job)

    def _push(self, at: float, job: Job | None) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, job))

    def trained_shares(self) -> list[float]:
        """Return the trained share of the longest third and of all examples that were started long ago."""
        old = self._begun_long_ago()
        groups = old[2 * len(old) // 3 :], old
        return [round(sum(name in self.trained for name in names) / len(names), 3) for names in groups]

    def of_short_and_long(self, trained: Counter[str]) -> list[float]:
        """Return the mean training of an example in the shortest and in the longest third. Equal values are best."""
        old = self._begun_long_ago()
        groups = old[: len(old) // 3], old[2 * len(old) // 3 :]
        return [round(sum(trained[name] for name in names) / len(names), 2) for names in groups]

    def _begun_long_ago(self) -> list[str]:
        last = len(self.steps) - min(SETTLED, len(self.steps) // 2)
        return sorted((name for name, step in self.begun.items() if step <= last), key=difficulty)

    def _finish(self, job: Job) -> None:
        group = self.dispatch.finished(job.id, rollout(job, self.dispatch.version))
        if group is not None:
            self.dispatch.add_ready(group)

    def _cut(self) -> bool:
        for group in self.dispatch.apply_age_limit(self.dispatch.step).early:
            self.dispatch.add_ready(group)
        groups = self.dispatch.take_batch()
        if groups is None:
            return False
        self.steps.append(self.now)
        for group in groups:
            example = group.id.partition(".")[0]
            self.trained[example] += 1
            self.trained_rollouts[example] += group.size
        return True


def difficulty(group: str) -> float:
    """Return the length of an example's rollouts [standard deviations]."""
    return random.Random(group).gauss(0, 1)


def rollout(job: Job, version: int) -> tuple[Rollout, ...]:
    """Return a job's rollout without tokens."""
    info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, reward=1.0)
    return (Rollout(info, TOKENS, TOKENS.astype(bool), TOKENS.astype(np.float32), TOKENS * version),)


class GroupsHoldPlaces(Dispatcher):
    """A simple rule: a group keeps its slots until all its rollouts are done."""

    def _may_open(self, available: Collection[str]) -> list[str]:
        sizes = self.limits.group_sizes
        held = sum(sizes[group.environment] for group in (*self.ready, *self.unscored.values()))
        expected = held + GROUP * (len(self.open) + 1)
        lands_in = self.step + (expected - 1) // self.limits.batch_size
        fits = expected <= max(2 * self.limits.batch_size, self.limits.max_inflight)
        return ["e"] if fits and self.version >= self.age_limit.oldest_version(lands_in) else []


class WheneverThereIsRoom(Dispatcher):
    """prime-rl's rule, as far as known: a group starts whenever a slot is free, and is dropped when too old."""

    def __init__(self, limits: DispatchLimits, *args: Any, **options: Any) -> None:
        super().__init__(limits, *args, **options)
        self.age_limit = NeverLate(limits.max_off_policy_steps, limits.staleness)
        self.ready = ReadyGroups(self.age_limit.version_of)

    def _may_open(self, available: Collection[str]) -> list[str]:
        return ["e"]


class NeverLate(AgeLimit):
    """Drops a group that is too old, however often."""

    def finishes_late(self, environment: str, example: int, name: str) -> bool:
        return False


OTHERS: dict[str, type[Dispatcher]] = {each.__name__: each for each in (GroupsHoldPlaces, WheneverThereIsRoom)}
SYNCHRONOUS = "synchronous"


def synchronous(inflight: int, sigma: float, batch: int, steps: int = 200) -> float:
    """Return the step time [s] if each step waits for its own rollouts, as in slime without oversampling."""
    source = np.random.default_rng(0)
    rounds = [source.lognormal(math.log(MEDIAN_S), sigma, batch) for _ in range(steps)]
    assert batch <= inflight
    return TRAINER_S + float(np.mean([each.max() for each in rounds]))


def measure(
    inflight: int,
    sigma: float,
    rule: str = "drop",
    shared: float = 0.0,
    extra_rollouts: int = 0,
    surplus: SurplusRule = "cancel",
    steps: int = STEPS,
) -> dict[str, Any]:
    """Simulate one setting.

    Args:
        inflight: number of slots.
        sigma: deviation of the log durations.
        rule: a staleness rule of recipes, or the name of one of the other rules here.
        shared: share of the variance of log durations that belongs to the example.
        extra_rollouts: rollouts per group beyond those that are trained.
        surplus: how extra rollouts are handled.
        steps: steps to measure after the warm-up.
    """
    batch = max(2 * GROUP, inflight // 2 // GROUP * GROUP)
    if rule == SYNCHRONOUS:
        return {"step_s": round(synchronous(inflight, sigma, batch)), "bound_s": bound(inflight, sigma, batch)}
    kind = OTHERS.get(rule, Dispatcher)
    stale_rule: StaleRule = "drop" if rule in OTHERS else rule  # type: ignore[assignment]
    staleness = Staleness(rule=stale_rule, extra_rollouts=extra_rollouts, surplus=surplus)
    limits = DispatchLimits({"e": GROUP}, batch, inflight, STALENESS, 10**9, {"e": 1.0}, staleness=staleness)
    world = World(limits, sigma, shared, kind)
    began = time.process_time()
    world.run(WARM_UP + steps)
    took = (world.steps[-1] - world.steps[WARM_UP - 1]) / steps
    counts = world.dispatch.counts
    used = world.in_use_s / (world.now - world.counted_from) / inflight
    at_best = bound(inflight, sigma, batch)
    independent = rule == "drop" and not shared and not extra_rollouts
    with_waste = {"bound_with_waste_s": bound_with_waste(inflight, sigma, batch)} if independent else {}
    return {
        "in_use": round(used, 3),
        "step_s": round(took),
        "bound_s": at_best,
        "step_over_bound": round(took / at_best, 3),
        **with_waste,
        "thrown_away": round((counts["rollouts_dropped_stale"] + counts["cancelled"]) / counts["dispatched"], 3),
        "rollouts_of_a_batch": round(world.trained_rollouts.total() / len(world.steps) / batch, 3),
        "trained_of_long_and_all": world.trained_shares(),
        "groups_of_short_and_long": world.of_short_and_long(world.trained),
        "rollouts_of_short_and_long": world.of_short_and_long(world.trained_rollouts),
        "cpu_ms_per_rollout": round((time.process_time() - began) * 1e3 / counts["dispatched"], 3),
    }


def bound(inflight: int, sigma: float, batch: int) -> int:
    """Return the best step time [s], limited by the trainer or by engines that are always full."""
    return round(max(TRAINER_S, batch * MEDIAN_S * math.exp(sigma**2 / 2) / inflight))


def bound_with_waste(inflight: int, sigma: float, batch: int) -> int:
    """Return the best step time [s] of `drop` if rollouts are independent.

    Engines are always full. A group has the steps for which its version is valid, less half of the step in which it
    opens. If any of its rollouts takes longer, all their work is discarded, and the example is sampled once more, to
    the end. Longer steps give groups more time. The result is the shortest step that is long enough for what it has to
    sample.
    """
    mean, normal = MEDIAN_S * math.exp(sigma**2 / 2), NormalDist()
    step = float(bound(inflight, sigma, batch))
    for _ in range(100):
        window = (STALENESS + 0.5) * step
        deviation = math.log(window / MEDIAN_S) / sigma
        in_time = normal.cdf(deviation)
        first = mean * normal.cdf(deviation - sigma) + window * (1 - in_time)
        step = max(TRAINER_S, batch * (first + (1 - in_time**GROUP) * mean) / inflight)
    return round(step)


def settings(large: bool) -> Iterator[dict[str, Any]]:
    """Return all settings that are simulated."""
    rules = get_args(StaleRule)
    if large:
        for sigma, rule in itertools.product(LARGE_SIGMAS, rules):
            yield {"inflight": LARGE, "sigma": sigma, "rule": rule, "steps": LARGE_STEPS}
        for rule in (*OTHERS, SYNCHRONOUS):
            yield {"inflight": LARGE, "sigma": 1.0, "rule": rule, "steps": LARGE_STEPS}
    for sigma in SIGMAS:
        for rule in (*OTHERS, SYNCHRONOUS):
            yield {"inflight": 512, "sigma": sigma, "rule": rule}
        yield {"inflight": 512, "sigma": sigma, "rule": "drop", "extra_rollouts": 2}
    for sigma, rule in itertools.product((1.0, 1.3), rules):
        yield {"inflight": 512, "sigma": sigma, "rule": rule, "shared": 0.5}
    for sigma, surplus in itertools.product((1.0, 1.3), get_args(SurplusRule)):
        extra = {"extra_rollouts": 2, "surplus": surplus}
        yield {"inflight": 512, "sigma": sigma, "rule": "drop", "shared": 0.5, **extra}
    for inflight, sigma in [*itertools.product((64, 512), SIGMAS), (2048, 1.0)]:
        for rule in rules:
            yield {"inflight": inflight, "sigma": sigma, "rule": rule}


def _measured(setting: dict[str, Any]) -> dict[str, Any]:
    return {**setting, **measure(**setting), "load_1m": round(os.getloadavg()[0], 1)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks dispatch", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write each row to {RESULT.relative_to(ROOT)}")
    parser.add_argument("--resume", action="store_true", help="leave out the settings that are in the file already")
    parser.add_argument("--large", action="store_true", help=f"{LARGE:,} rollouts in flight, too: half an hour")
    options = parser.parse_args(words)
    asked = list(settings(options.large))
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["rows"] if options.resume and RESULT.exists() else []
    there = [{name: row[name] for name in SETTING if name in row} for row in rows]
    todo = [setting for setting in asked if setting not in there]
    command = " ".join(["python -m benchmarks dispatch", *(["--large"] if options.large else []), "--write"])
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for ended in as_completed([pool.submit(_measured, setting) for setting in todo]):
            rows.append(ended.result())
            print(rows[-1], flush=True)
            if options.write:
                write_json(RESULT, {"command": command, "cpus": os.cpu_count(), "rows": rows})
