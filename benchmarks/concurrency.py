"""How near the concurrency controller comes to the best static cap, under a simulated clock.

The real dispatcher and controller over four simulated engines (`benchmarks.support.simulated_engine`), each a replica,
looked at every five seconds as in a run. For each workload static caps are tried, and the best kept; then the
controller starts from nothing. After half an hour a replica is lost: its engine answers nothing more, and half a minute
later the fleet gives it up. In another run its engine takes four times as long from then on.

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

from benchmarks.support.simulated_engine import SimulatedEngine, Turn
from primeslurm.orchestrator.dispatch import Dispatcher, Limits
from primeslurm.orchestrator.dispatch.concurrency import Concurrency
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.wire.rollouts import Rollout, RolloutInfo

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "concurrency.json"
REPLICAS, GROUP, TICK_S, LOOK_S = 4, 8, 1.0, 5.0
BOUND = 4096
COLD_S, LOST_AT_S, END_S = 600.0, 1800.0, 3000.0
TOKENS = np.ones(2, np.int32)


@dataclass(frozen=True)
class Workload:
    """Rollouts of one kind. Lengths are log-normal: median, and deviation of the logarithm."""

    name: str
    prompt: int
    answer: tuple[float, float]
    turns: int = 1
    observed: int = 0
    """Tokens that a tool answers."""
    tool_s: float = 0.0
    longest: int = 32_768

    def script(self, job: str) -> list[tuple[int, int, float]]:
        """Say of each turn: new tokens in the prompt, tokens of the answer, and seconds until then."""
        source = random.Random(job)
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
    Workload("short answers", 500, (300, 0.5)),
    Workload("long answers", 1000, (8000, 0.3)),
    Workload("agents, 30 turns", 2000, (150, 0.5), turns=30, observed=300, tool_s=4.0),
    Workload("heavy tail", 1000, (1500, 1.2)),
)


@dataclass
class World:
    """Engines, sessions in tools, a trainer that is never waited for."""

    workload: Workload
    cap: int | None
    """Static; None: the controller."""
    loses: bool = False
    slows: bool = False
    now: float = 0.0
    tokens: list[tuple[float, float]] = field(default_factory=list)
    inflight: list[tuple[float, int]] = field(default_factory=list)
    preempted: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.routers = [f"router-{number}" for number in range(REPLICAS)]
        self.engines = {router: SimulatedEngine() for router in self.routers}
        limits = Limits({"e": GROUP}, 1024, self.cap or BOUND, 64, 10**9, {"e": 1.0})
        self.dispatch = Dispatcher(limits, self.routers, "s", "i", clock=lambda: self.now)
        self.dispatch.version = 0
        self.controller = None if self.cap else Concurrency(self.routers, BOUND, clock=lambda: self.now)
        self._jobs: dict[str, tuple[Job, list[tuple[int, int, float]], int]] = {}
        self._tools: list[tuple[float, str, int]] = []
        self._gone: set[str] = set()
        self._generated = self._preempted = 0.0

    def run(self, seconds: float) -> None:
        """Simulate until then."""
        ticks = round((seconds - self.now) / TICK_S)
        for _ in range(ticks):
            if self.now % LOOK_S == 0:
                self._look()
            self._events()
            while job := self.dispatch.next_job({"e"}):
                self._jobs[job.id] = (job, self.workload.script(job.id), 0)
                self._turn(job.id, 0)
            while self._tools and self._tools[0][0] <= self.now:
                _, name, context = heapq.heappop(self._tools)
                if name in self._jobs:
                    self._turn(name, context)
            for router, engine in self.engines.items():
                if router not in self._gone:
                    for turn in engine.advance(TICK_S):
                        self._answered(turn)
            self.now += TICK_S

    def rate(self, since: float, until: float, what: str = "tokens") -> float:
        """Mean over a time."""
        series = getattr(self, what)
        first, last = (next(value for at, value in series if at >= moment) for moment in (since, until))
        return (last - first) / (until - since)

    def _look(self) -> None:
        alive = {router: engine for router, engine in self.engines.items() if router not in self._gone}
        total = {
            name: sum(engine.counts[name] for engine in self.engines.values()) for name in ("generated", "preemptions")
        }
        self.tokens.append((self.now, total["generated"]))
        self.preempted.append((self.now, total["preemptions"]))
        self.inflight.append((self.now, self.dispatch.inflight))
        if self.controller is not None:
            samples = {
                router.replace("router-", "engine-r") + "-0": engine.sample() for router, engine in alive.items()
            }
            self.controller.look(samples, self.dispatch.replicas.load, self.dispatch.replicas.ended)
            self.dispatch.replicas.shares = self.controller.shares

    def _total(self, name: str) -> float:
        return sum(engine.counts[name] for engine in self.engines.values())

    def _events(self) -> None:
        lost = self.routers[-1]
        if self.loses and self.now == LOST_AT_S:
            self._gone.add(lost)
        if self.loses and self.now == LOST_AT_S + 30:
            for job in self.dispatch.drop_router(lost):
                del self._jobs[job]
            if self.controller is not None:
                self.controller.drop(lost)
        if self.slows and self.now == LOST_AT_S:
            self.engines[lost].speed = 0.25

    def _turn(self, name: str, context: int) -> None:
        job, script, number = self._jobs[name]
        new, answer, _ = script[number]
        self.engines[job.router].add(Turn(name, job.group, self.workload.prompt, context + new, answer))

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


def caps() -> list[int]:
    """Return the static caps that are tried."""
    return [round(64 * 1.25**step / REPLICAS) * REPLICAS for step in range(16)]


def measure(workload: Workload) -> dict[str, Any]:
    """Find the best static cap, and see the controller."""
    found: dict[int, tuple[float, float]] = {}
    best = 0
    for cap in caps():
        world = World(workload, cap)
        world.run(LOST_AT_S + LOOK_S)
        found[cap] = (world.rate(COLD_S, LOST_AT_S), world.rate(COLD_S, LOST_AT_S, "preempted"))
        best = cap if not best or found[cap][0] > found[best][0] else best
        if found[cap][0] < 0.9 * found[best][0] or cap > 2 * best:
            break
    most = found[best][0]
    world = World(workload, None, loses=True)
    world.run(END_S + LOOK_S)
    found_by_it = seen(world, most)
    world = World(workload, None, slows=True)
    world.run(LOST_AT_S)
    before = world.controller.shares[world.routers[-1]]  # type: ignore[union-attr]
    world.run(LOST_AT_S + 60)
    after = world.controller.shares[world.routers[-1]]  # type: ignore[union-attr]
    row = {
        "workload": workload.name,
        "best_cap": best,
        "best": round(most),
        "preempted_at_best": round(60 * found[best][1]),
    }
    return row | found_by_it | {"share_of_a_slow_replica": round(after / before, 2)}


def seen(world: World, most: float) -> dict[str, Any]:
    """Compare the controller's run with what the best static cap gives."""
    window = 120.0
    starts = np.arange(0, LOST_AT_S - window, LOOK_S * 2)
    reached = next((at + window for at in starts if world.rate(at, at + window) >= 0.95 * most), None)
    rest = (REPLICAS - 1) / REPLICAS * most
    later = np.arange(LOST_AT_S + window, END_S - window, LOOK_S * 2)
    after = next((at for at in later if world.rate(at, at + window) >= 0.95 * rest), None)
    inflight = [number for at, number in world.inflight if COLD_S <= at < LOST_AT_S]
    return {
        "reached_s": None if reached is None else float(reached),
        "share": round(world.rate(COLD_S, LOST_AT_S) / most, 3),
        "mean_inflight": round(float(np.mean(inflight))),
        "preempted_per_min": round(world.rate(COLD_S, LOST_AT_S, "preempted") * 60, 1),
        "reached_after_loss_s": None if after is None else float(after + window - LOST_AT_S),
        "share_after_loss": round(world.rate(LOST_AT_S + 300, END_S) / rest, 3),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Simulate every workload, print, and with --write keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks concurrency", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("workload", nargs="*", help="number of the workloads to run, from 0; default: all")
    options = parser.parse_args(words)
    rows = []
    for workload in [WORKLOADS[int(number)] for number in options.workload] or WORKLOADS:
        rows.append(measure(workload))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        RESULT.write_text(
            json.dumps({"command": "python -m benchmarks concurrency --write", "rows": rows}, indent=1) + "\n"
        )
