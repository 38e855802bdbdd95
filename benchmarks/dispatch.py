"""How full the dispatcher keeps the engines under a long tail, under a simulated clock.

Durations of rollouts are log-normal with a median of ten minutes; a step of the trainer takes four. Engines take as
many rollouts as may be in flight, at no loss. Measured after a warm-up: the mean share of the places that were in use, the
time of a step beside the bound (of what engines and trainer could do at best, whichever is slower), the share of the
sampled seconds that was thrown away, and of the groups of long and of short examples those that were given up.

    python -m benchmarks dispatch [--write]
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from primeslurm.orchestrator.dispatch import Dispatcher, Limits
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.recipe.sections.staleness import Staleness, StaleRule
from primeslurm.wire.rollouts import Rollout, RolloutInfo

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "dispatch.json"
MEDIAN_S, TRAINER_S = 600.0, 240.0
BATCH, GROUP = 256, 16
WARM_UP, STEPS = 12, 40
TOKENS = np.ones(2, np.int32)


@dataclass
class World:
    """What is simulated: rollouts that take their time, and a trainer that asks for batches."""

    limits: Limits
    sigma: float
    shared: float
    """Share of the variance of log durations that is the example's own."""
    trainer_s: float = TRAINER_S
    now: float = 0.0
    _events: list[tuple[float, int, Job | None]] = field(default_factory=list)
    _serial: int = 0
    _seconds: dict[str, tuple[float, Job]] = field(default_factory=dict)
    in_use_s: float = 0.0
    sampled_s: float = 0.0
    trained_s: float = 0.0
    steps: list[float] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    _counted_from: float | None = None

    def __post_init__(self) -> None:
        self.dispatch = Dispatcher(self.limits, ["r"], "s", "i", clock=lambda: self.now)

    def duration(self, job: Job) -> float:
        """Seconds of a rollout: of its example, and its own."""
        own = random.Random(job.id).gauss(0, 1)
        deviation = math.sqrt(self.shared) * difficulty(job.group.partition(".")[0]) + math.sqrt(1 - self.shared) * own
        return MEDIAN_S * math.exp(self.sigma * deviation)

    def run(self, steps: int) -> None:
        """Simulate so many steps."""
        self.dispatch.version = 0
        waiting = True
        while len(self.steps) < steps:
            while job := self.dispatch.next_job({"e"}):
                self._seconds[job.id] = (self.now, job)
                self._push(self.now + self.duration(job), job)
            if waiting and self._cut():
                waiting = False
                self._push(self.now + self.trainer_s, None)
                continue
            at, _, job = heapq.heappop(self._events)
            if len(self.steps) >= WARM_UP:
                self._counted_from = self.now if self._counted_from is None else self._counted_from
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

    def _finish(self, job: Job) -> None:
        self.sampled_s += self.now - self._seconds.pop(job.id)[0]
        group = self.dispatch.finished(job.id, rollout(job, self.dispatch.version))
        if group is not None:
            self.dispatch.add_ready(group)

    def _cut(self) -> bool:
        _, cancelled, early = self.dispatch.sweep(self.dispatch.step)
        for name in cancelled:
            self.sampled_s += self.now - self._seconds.pop(name)[0]
        for group in early:
            self.dispatch.add_ready(group)
        groups = self.dispatch.cut()
        if groups is None:
            return False
        self.steps.append(self.now)
        for group in groups:
            self.trained.append(group.id)
            self.trained_s += self._worth(group)
        return True

    def _worth(self, group: RolloutGroup) -> float:
        return sum(rollout[0].info.reward for rollout in group.rollouts)


def difficulty(group: str) -> float:
    """How long an example's rollouts are, in standard deviations."""
    return random.Random(group).gauss(0, 1)


def rollout(job: Job, version: int) -> tuple[Rollout, ...]:
    """What a job makes, but for its tokens."""
    info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, reward=1.0)
    return (Rollout(info, TOKENS, TOKENS.astype(bool), TOKENS.astype(np.float32), TOKENS * version),)


def measure(
    inflight: int,
    sigma: float,
    rule: StaleRule,
    off_policy: int = 8,
    batch: int = BATCH,
    shared: float = 0.0,
    **more: Any,
) -> dict[str, float]:
    """Simulate one setting."""
    limits = Limits(
        {"e": GROUP}, batch, inflight, off_policy, 10**9, {"e": 1.0}, staleness=Staleness(rule=rule, **more)
    )
    world = World(limits, sigma, shared)
    began = time.perf_counter()
    world.run(WARM_UP + STEPS)
    took = (world.steps[-1] - world.steps[WARM_UP - 1]) / STEPS
    bound = max(TRAINER_S, batch * MEDIAN_S * math.exp(sigma**2 / 2) / inflight)
    counts = world.dispatch.counts
    return {
        "inflight": inflight,
        "sigma": sigma,
        "rule": rule,
        "in_use": round(world.in_use_s / (world.now - world._counted_from) / inflight, 3),
        "step_s": round(took),
        "bound_s": round(bound),
        "stale": round(counts["rollouts_dropped_stale"] / counts["dispatched"], 3),
        "early": counts["groups_completed_early"],
        "carried": counts["rollouts_carried"],
        "returned": counts["examples_returned"],
        "cpu_ms": round((time.perf_counter() - began) * 1e3 / counts["dispatched"], 3),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Simulate every setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks dispatch", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.parse_args(words)
    for inflight in (512,):
        for sigma in (0.3, 0.6, 1.0, 1.3):
            for rule in ("drop", "mask", "partial", "carry"):
                print(measure(inflight, sigma, rule), flush=True)
