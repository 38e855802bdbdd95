"""Throughput of the concurrency controller compared with the best static cap, under a simulated clock.

The real dispatcher and controller run four simulated engines (`benchmarks.support.simulated_engine`), each a
replica, polled every five seconds as in a run. Each engine starts half a minute after the previous one. For each
workload, static caps are tried to find the best one; then the controller starts from nothing. All results are means
over the same three draws of lengths. After half an hour one replica is lost: its engine stops answering, and half a
minute later the fleet gives it up. In another run its engine becomes four times slower.

    python -m benchmarks concurrency [--write] [WORKLOAD ...]
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.simulated_engine import PrefillDecode, SimulatedEngine, Turn
from primeslurm.orchestrator.dispatch import Dispatcher, DispatchLimits
from primeslurm.orchestrator.dispatch.concurrency import Concurrency
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "concurrency.json"
REPLICAS, GROUP, LOOK_S = 4, 8, 5.0
BOUND = 4096
# Speed of the slow replica.
SLOW = 0.25
# Time between two engine starts [s]. Requests to an engine wait until it has started.
STAGGER_S = 30.0
COLD_S, WINDOW_S = 600.0, 300.0
DRAWS = 3
TOKENS = np.ones(2, np.int32)


@dataclass(frozen=True)
class Workload:
    """Rollouts of one kind. Lengths are log-normal, given as the median and the deviation of the logarithm."""

    name: str
    prompt: int
    answer: tuple[float, float]
    turns: int = 1
    observed: int = 0
    """Tokens of a tool's answer."""
    tool_s: float = 0.0
    longest: int = 32_768
    system: int = 0
    """Tokens at the start of the prompt that all rollouts share. With 0 a group shares its whole prompt."""
    separate: bool = False
    """Whether each replica has a prefill and a decode engine."""
    steady_s: float = 1800.0
    """Duration of a run with a cap, and of the controller's run before a replica is lost; two thirds of it follow."""
    tick_s: float = 1.0
    """Ended rollouts are replaced at the next tick, so a tick is much shorter than a rollout."""

    @property
    def end_s(self) -> float:
        return self.steady_s * 5 / 3

    def script(self, job: str, draw: int) -> list[tuple[int, int, float]]:
        """Yield for each turn: new tokens in the prompt, tokens of the answer, and seconds until the next turn."""
        source = random.Random(f"{draw}/{job}")
        turns = source.randint(max(1, self.turns // 2), self.turns * 3 // 2) if self.turns > 1 else 1
        median, sigma = self.answer
        return [
            (
                self.observed if turn else self.prompt,
                max(1, min(self.longest, int(median * math.exp(source.gauss(0, sigma))))),
                self.tool_s * math.exp(source.gauss(0, 0.5)) if turn else 0.0,
            )
            for turn in range(turns)
        ]


WORKLOADS = (
    Workload("long answers", 1000, (8000, 0.3)),
    Workload("agents, 30 turns", 2000, (150, 0.5), turns=30, observed=300, tool_s=4.0),
    Workload("heavy tail", 1000, (1500, 1.3)),
    Workload("shared system prompt", 9000, (3000, 0.7), system=8000),
    Workload("too little prefill", 8000, (400, 0.5), system=1000, separate=True, steady_s=900.0),
    Workload("short answers", 500, (300, 0.5), steady_s=900.0, tick_s=0.5),
    Workload("agents, tools of 20 s", 2000, (150, 0.5), turns=30, observed=300, tool_s=20.0),
    Workload("agents, tools of 40 s", 2000, (300, 0.7), turns=15, observed=300, tool_s=40.0),
    Workload("agents, 60 turns, tools of 10 s", 2000, (150, 0.5), turns=60, observed=300, tool_s=10.0),
    Workload("agents, 100 turns", 2000, (150, 0.5), turns=100, observed=300, tool_s=4.0),
)


@dataclass
class World:
    """Engines, tool sessions, and a trainer that is always ready."""

    workload: Workload
    cap: int | None
    """Static cap; None for the controller."""
    draw: int = 0
    """Seed of the lengths."""
    loses: bool = False
    slows: bool = False
    now: float = 0.0
    tokens: list[tuple[float, float]] = field(default_factory=list)
    inflight: list[tuple[float, int]] = field(default_factory=list)
    preempted: list[tuple[float, float]] = field(default_factory=list)
    ended: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.routers = [f"router-{number}" for number in range(REPLICAS)]
        kind = PrefillDecode if self.workload.separate else SimulatedEngine
        self.engines = {router: kind() for router in self.routers}
        limits = DispatchLimits({"e": GROUP}, 1024, self.cap or BOUND, 64, 10**9, {"e": 1.0})
        self.dispatch = Dispatcher(limits, self.routers, "s", "i", clock=lambda: self.now)
        self.dispatch.version = 0
        self.controller = None
        if not self.cap:
            names = [
                name for number, router in enumerate(self.routers) for name in self.engines[router].samples(number)
            ]
            self.controller = Concurrency(self.routers, names, BOUND, clock=lambda: self.now)
            self.dispatch.replicas.limits = self.controller.slots
        self._jobs: dict[str, tuple[Job, list[tuple[int, int, float]], int]] = {}
        self._tools: list[tuple[float, str, int]] = []
        self._gone: set[str] = set()
        self._up_at = {router: number * STAGGER_S for number, router in enumerate(self.routers)}

    def run(self, seconds: float) -> None:
        """Simulate until this time [s]."""
        ticks = round((seconds - self.now) / self.workload.tick_s)
        for _ in range(ticks):
            if self.now % LOOK_S == 0:
                self._look()
            self._events()
            while job := self.dispatch.next_job({"e"}):
                self._jobs[job.id] = (job, self.workload.script(job.id, self.draw), 0)
                self._turn(job.id, 0)
            while self._tools and self._tools[0][0] <= self.now:
                _, name, context = heapq.heappop(self._tools)
                if name in self._jobs:
                    self._turn(name, context)
            for router, engine in self.engines.items():
                if self._is_up(router):
                    for turn in engine.advance(self.workload.tick_s):
                        self._answered(turn)
            self.now += self.workload.tick_s

    def rate(self, since: float, until: float, what: str = "tokens") -> float:
        """Return the mean of a count per second over a time span."""
        series = getattr(self, what)
        first, last = (next(value for at, value in series if at >= moment) for moment in (since, until))
        return (last - first) / (until - since)

    def preempted_of(self, rollouts: int) -> float:
        """Return preemptions per rollouts that ended, before the fault."""
        times = (COLD_S, self.workload.steady_s)
        return round(rollouts * self.rate(*times, "preempted") / max(1e-9, self.rate(*times, "ended")), 1)

    def _is_up(self, router: str) -> bool:
        return router not in self._gone and self.now >= self._up_at[router]

    def _look(self) -> None:
        alive = {router: engine for router, engine in self.engines.items() if self._is_up(router)}
        total = {
            name: sum(engine.counts[name] for engine in self.engines.values()) for name in ("generated", "preemptions")
        }
        self.tokens.append((self.now, total["generated"]))
        self.ended.append((self.now, self.dispatch.counts["finished"]))
        self.preempted.append((self.now, total["preemptions"]))
        self.inflight.append((self.now, self.dispatch.inflight))
        if self.controller is not None and self.now:
            samples: dict[str, dict[str, float]] = {}
            for router, engine in alive.items():
                samples |= engine.samples(int(router.removeprefix("router-")))
            self.controller.observe(samples, self.dispatch.replicas.load, self.dispatch.replicas.ended)
            self.dispatch.replicas.limits = self.controller.slots

    def _events(self) -> None:
        lost = self.routers[-1]
        if self.loses and self.now == self.workload.steady_s:
            self._gone.add(lost)
        if self.loses and self.now == self.workload.steady_s + 30:
            for job in self.dispatch.drop_router(lost):
                del self._jobs[job]
            if self.controller is not None:
                self.controller.drop(lost)
        if self.slows and self.now == self.workload.steady_s:
            self.engines[lost].speed = SLOW

    def _turn(self, name: str, context: int) -> None:
        job, script, number = self._jobs[name]
        new, answer, _ = script[number]
        kind = self.workload
        prefix, shared = ("system", kind.system) if kind.system else (job.group, kind.prompt)
        self.engines[job.router].add(Turn(name, prefix, shared, context + new, answer))

    def _answered(self, turn: Turn) -> None:
        job, script, number = self._jobs[turn.job]
        if number + 1 < len(script):
            self._jobs[turn.job] = (job, script, number + 1)
            heapq.heappush(self._tools, (self.now + script[number + 1][2], turn.job, turn.length))
            return
        del self._jobs[turn.job]
        info = RolloutInfo(job.id, job.group, job.environment, job.opened_version, reward=1.0)
        group = self.dispatch.finished(
            job.id, (Rollout(info, TOKENS, TOKENS.astype(bool), TOKENS.astype(np.float32), TOKENS * 0),)
        )
        if group is not None:
            self.dispatch.rejected(group, "counted")


def worlds(workload: Workload, cap: int | None, until: float, **how: bool) -> list[World]:
    """Simulate all draws."""
    made = [World(workload, cap, draw, **how) for draw in range(DRAWS)]
    for world in made:
        world.run(until + LOOK_S)
    return made


def rate(made: list[World], since: float, until: float) -> float:
    """Return tokens per second over a time span, as the mean of all draws."""
    return float(np.mean([world.rate(since, until) for world in made]))


def best_cap(workload: Workload) -> tuple[int, list[World]]:
    """Return the static cap with the most tokens per second, searched in steps of a quarter, then finer."""
    tried: dict[int, list[World]] = {}

    def most(cap: int) -> float:
        if cap not in tried:
            tried[cap] = worlds(workload, cap, workload.steady_s)
        return rate(tried[cap], COLD_S, workload.steady_s)

    best = cap = 48
    while cap < 2 * best and most(cap) > 0.9 * most(best):
        best, cap = max(best, cap, key=most), round(cap * 1.25 / REPLICAS) * REPLICAS
    for factor in (0.8, 0.9, 0.95, 1.05, 1.1):
        most(round(best * factor / REPLICAS) * REPLICAS)
    best = max(tried, key=most)
    return best, tried[best]


def measure(workload: Workload) -> dict[str, Any]:
    """Find the best static cap, and measure the controller: from nothing, after a loss, and with a slow replica."""
    cap, best = best_cap(workload)
    steady, end = workload.steady_s, workload.end_s
    most = rate(best, COLD_S, steady)
    row = {
        "workload": workload.name,
        "best_cap": cap,
        "best": round(most),
        "preempted_at_best": _preempted(best),
        "worst_at_best": _worst(best, most),
    }
    row |= seen(worlds(workload, None, end, loses=True), best, most)
    slowed = worlds(workload, None, end, slows=True)
    able = (REPLICAS - 1 + SLOW) / REPLICAS * most
    return row | {"share_with_a_slow_replica": round(rate(slowed, steady + 300, end) / able, 3)}


def seen(made: list[World], best: list[World], most: float) -> dict[str, Any]:
    """Compare the controller's runs with the best static cap."""
    steady, end = made[0].workload.steady_s, made[0].workload.end_s
    enough = [
        (float(at), rate(made, at, steady) >= 0.95 * most) for at in np.arange(0, steady - 2 * WINDOW_S + 1, LOOK_S * 6)
    ]
    late = [at for at, is_enough in enough if not is_enough]
    reached = next((at for at, _ in enough if not late or at > late[-1]), None)
    each = [world.rate(COLD_S, steady) / other.rate(COLD_S, steady) for world, other in zip(made, best, strict=True)]
    rest = (REPLICAS - 1) / REPLICAS * most
    inflight = [number for world in made for at, number in world.inflight if COLD_S <= at < steady]
    return {
        "reached_s": reached,
        "share": round(rate(made, COLD_S, steady) / most, 3),
        "share_of_draws": [round(share, 3) for share in each],
        "worst": _worst(made, most),
        "mean_inflight": round(float(np.mean(inflight))),
        "preempted": _preempted(made),
        "share_from_loss": round(rate(made, steady, end) / rest, 3),
        "share_after_loss": round(rate(made, steady + 300, end) / rest, 3),
    }


def _worst(made: list[World], most: float) -> float:
    """Return the lowest throughput of any five minutes in any draw, relative to the best cap's mean."""
    starts = np.arange(COLD_S, made[0].workload.steady_s - WINDOW_S + 1, 60)
    return round(min(world.rate(at, at + WINDOW_S) for world in made for at in starts) / most, 3)


def _preempted(made: list[World]) -> float:
    """Return preemptions per 1,000 rollouts."""
    return round(float(np.mean([world.preempted_of(1000) for world in made])), 1)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks concurrency", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("workload", nargs="*", help="number of the workloads to run, from 0; default: all")
    options = parser.parse_args(words)
    rows = []
    for workload in [WORKLOADS[int(number)] for number in options.workload] or WORKLOADS:
        rows.append(measure(workload))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        command = " ".join(["python -m benchmarks concurrency --write", *options.workload])
        RESULT.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
