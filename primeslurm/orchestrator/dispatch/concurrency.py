"""Adaptive concurrency: how many rollouts each replica may have in flight. Pure, apart from the clock.

Engines generate the most tokens per second when the KV cache just holds all rollouts in flight. With fewer, a decode
step takes as long for fewer tokens. With more, requests queue, running requests are preempted, and the prompts of
rollouts that wait for a tool are evicted and computed again. An admitted rollout cannot be withdrawn, and it grows for
its whole lifetime. So the limit follows the predicted size of rollouts, not the present use of the cache.

1. `RolloutModel` learns the size of a rollout from all replicas, and predicts its mean over a lifetime.
2. `ReplicaLimit` follows the lowest of its bounds: down at once, and up step by step while the limit is used.
   - growing: before any rollout has ended, lifetimes are unknown, and the limit grows in proportion to time.
   - kv: running requests fill the cache, except for a headroom.
   - cache: all rollouts, including those that wait for a tool, fill the cache.
   - queue, prefill: requests wait although the cache has room, so the engines are busy without them.
3. `Concurrency` scales down the limit of a replica that is much slower than the others.

An evaluation runs on the same engines beside training. Engine metrics include its requests, so they are compared with
the rollouts of both. The limit is for training alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_high
from types import MappingProxyType

from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, ENGINE, Sample
from primeslurm.records.state import Limit, ReplicaLoad

# A dozen rollouts are enough to measure an engine, and too few to overload it.
START_PER_ENGINE = 12
# Fewer rollouts than this would leave an engine idle whenever one of them ends.
FLOOR_PER_ENGINE = 2
# Until the first rollout ends, each five minutes allow as many more, because rollouts then differ in age.
FIRST_S = 300.0
# The limit grows by 20 % in ten seconds, because engines show the effect of a larger limit only after seconds. Up to an
# eighth of what the cache holds, it grows fourfold in that time, or in four lifetimes of a rollout if they are shorter.
GROWTH, FAR_GROWTH, FAR, GROWTH_S, SHOWN_LIFETIMES = 1.2, 4.0, 8.0, 10.0, 4.0
# Below this use, the limit holds back no rollout, so there is no reason to raise it.
USED_SHARE = 0.8

# Means cover twelve lifetimes, because lengths vary, but at most half an hour, because the policy changes.
MEMORY_LIFETIMES, MIN_MEMORY_S, MAX_MEMORY_S = 12.0, 60.0, 1800.0
# The growth of rollouts is extrapolated at most threefold, because the few turns of young rollouts say little.
MAX_AHEAD = 3.0
# Rollouts in flight are of all ages once 1.5 times their number has ended.
SETTLED = 1.5
# Before that, they grow together, so the cache keeps room for their growth during a fifth of a lifetime.
SOON = 0.2
# Gauges and rates are averaged over half a minute, because a single look is too noisy.
SMOOTHED_S = 30.0

# A sum of n independent sizes varies by the root of n (Halfin and Whitt, 1981), so 1.2 roots are kept free.
HEADROOM = 1.2
# Throughput collapses once rollouts that wait for tools evict each other's prompts, so about an eighth stays free.
CACHE_SHARE = 0.87
# An engine computes a full cache in 20 s (400,000 tokens of an 8B model on an H100); rollouts whose tools take longer
# may be evicted, because computing their prompts again costs less than an idle engine.
REFILL_S = 20.0
# Above this use of the cache, waiting requests are those that the limit admits on average, and they keep it full.
FULL_KV = 0.75
# One waiting request for ten running ones keeps an engine busy; prefill gets more, as rollouts start in waves.
QUEUED, PREFILL_QUEUED = 0.1, 1.0

# A replica is slow below half the median rate per rollout, unless its total is normal because it has more rollouts.
SLOW_EACH, SLOW_TOTAL = 0.5, 0.8
# Slots are refilled a moment after they are freed, so `max_inflight_rollouts` is the limit from this share on.
BOUND_SHARE = 0.95
# Engines that report no metric this long after the first rollout never will.
NO_METRICS_S = 60.0


@dataclass(frozen=True)
class Look:
    """Metrics of a replica's engines that sample, since the previous look."""

    seconds: float
    inflight: int  # training rollouts
    rollouts: int  # training and evaluation rollouts
    running: float  # requests
    waiting: float  # requests for which the engines that sample have no room
    prefill_waiting: float  # requests
    kv: float  # used KV caches, summed over engines
    generated: float  # tokens
    answered: float  # requests

    def without_queue(self, waiting: float, queued: float) -> float:
        """Return the rollouts with which only `queued` requests would wait per running request."""
        spare = queued * self.running + 1
        return self.rollouts - (waiting - spare / 2) if waiting > spare else math.inf


class RolloutModel:
    """Learns the size of a rollout, as a share of an engine's KV cache, from all replicas: each alone has too few."""

    def __init__(self) -> None:
        # Sums that decay: seconds of rollouts, of running and all requests, of rollouts at tools, and of sizes; counts
        self._sums = dict.fromkeys(("rollout_s", "running_s", "request_s", "tool_s", "kv_s", "ended", "answered"), 0.0)
        self._ended = 0  # since the start of the run
        self._inflight = 0
        self._elapsed = 0.0  # seconds with rollouts
        self._ages: deque[tuple[float, int]] = deque()  # rollouts in flight, oldest first: start, number
        self._done = 0.0  # rollouts that have ended so far, if those in flight count by their age
        self._start = math.inf  # size of the youngest rollouts, the least seen
        self._present: float | None = None  # size now, smoothed
        self._soon = 0.0  # size after a part of a lifetime

    def observe(self, looks: Collection[Look], inflight: int, ended: int, seconds: float) -> None:
        """Add one look at each replica. `ended` training rollouts have ended since the start of the run."""
        if not inflight or not seconds:
            return
        age = self._follow(inflight, ended - self._ended, seconds)
        sums, lifetime = self._sums, self.lifetime
        decay = math.exp(-seconds / min(MAX_MEMORY_S, max(MIN_MEMORY_S, MEMORY_LIFETIMES * lifetime)))
        for name in sums:
            sums[name] *= decay
        if not self._ended:
            sums["kv_s"] = sums["running_s"] = 0.0  # sizes that were predicted without a lifetime do not count
        sums["rollout_s"] += inflight * seconds
        sums["ended"] += ended - self._ended
        self._ended, self._inflight = ended, inflight
        running = sum(look.running for look in looks)
        requests = sum(look.running + look.waiting + look.prefill_waiting for look in looks)
        sums["request_s"] += requests * seconds
        sums["tool_s"] += max(0.0, sum(look.rollouts for look in looks) - requests) * seconds
        sums["answered"] += sum(look.answered for look in looks)
        if not running:
            return
        # A line through the size at the start and the present size, continued to half a lifetime, the mean age later on
        size = sum(look.kv for look in looks) / running
        self._start = min(self._start, size)
        ahead = min(MAX_AHEAD, lifetime / 2 / age)
        sums["kv_s"] += (self._start + (size - self._start) * ahead) * running * seconds
        sums["running_s"] += running * seconds
        self._present = _smooth(self._present, size, seconds)
        self._soon = self._present + SOON * lifetime * (self._present - self._start) / age

    def _follow(self, inflight: int, ended: int, seconds: float) -> float:
        """Follow starts and ends, and return the mean age. The oldest are taken to end first, which keeps the mean."""
        self._elapsed += seconds
        gone = sum(number for _, number in self._ages) - inflight
        self._ages.append((self._elapsed - seconds / 2, max(0, ended - gone)))
        gone = max(gone, ended)
        while gone >= self._ages[0][1]:
            gone -= self._ages.popleft()[1]
        self._ages[0] = self._ages[0][0], self._ages[0][1] - gone
        ages = [(self._elapsed - start, number) for start, number in self._ages]
        # Without those in flight, short rollouts, which end first, would look like all there are.
        lifetime = max(1e-9, self.lifetime)
        self._done = sum(number * min(0.5, age / lifetime) for age, number in ages)
        return max(seconds / 2, sum(age * number for age, number in ages) / inflight)

    @property
    def lifetime(self) -> float:  # mean duration of a rollout [s]
        return self._sums["rollout_s"] / max(1e-9, self._sums["ended"] + self._done)

    @property
    def first_limit(self) -> float:  # per engine, before any rollout has ended
        return math.inf if self._ended else START_PER_ENGINE * max(1.0, self._elapsed / FIRST_S)

    @property
    def settled(self) -> float:  # 1: the rollouts in flight are of all ages
        return min(1.0, self._ended / max(1.0, SETTLED * self._inflight))

    @property
    def bounds(self) -> tuple[float, float]:
        """Return how many rollouts per engine fill the cache by their running requests, and by all they hold."""
        sums = self._sums
        mean = max(1e-9, sums["kv_s"] / max(1e-9, sums["running_s"]))
        size = mean * self.settled + max(mean, self._soon) * (1 - self.settled)
        usable = max(0.0, 1 - HEADROOM * math.sqrt(size))
        per_request = 1 + sums["tool_s"] / max(1e-9, sums["request_s"])
        between_turns_s = sums["tool_s"] / sums["answered"] if sums["answered"] >= 1 else 0.0
        return usable * per_request / size, max(usable / size, CACHE_SHARE / size, between_turns_s / REFILL_S / mean)


class ReplicaLimit:
    """The limit of one replica, with `engines` that sample."""

    def __init__(self, engines: int) -> None:
        self.limited_by: Limit = "growing"
        self.tokens_per_s: float | None = None  # None: unknown
        self.speed = 1.0  # below 1 for a slow replica
        self._engines = engines
        self._per_engine = float(START_PER_ENGINE)

    @property
    def slots(self) -> int:
        # At least one: without any rollout, nothing would show that a slow replica has recovered.
        return max(1, int(self._per_engine * self._engines * self.speed)) if self._engines else 0

    def set_engines(self, answering: int, fresh: int) -> None:
        """Set how many engines that sample answer, and how many of them have just started with an empty cache."""
        if fresh:
            first = min(self._per_engine, START_PER_ENGINE)
            self._per_engine += (first - self._per_engine) * fresh / answering
            self.tokens_per_s, self.speed = None, 1.0
        if answering != self._engines:
            self._engines, self.limited_by = answering, "growing" if answering else "lost"

    def observe(self, look: Look, model: RolloutModel) -> None:
        if not look.inflight:
            self.tokens_per_s = None
            return
        self.tokens_per_s = _smooth(self.tokens_per_s, look.generated / look.seconds, look.seconds)
        kv, cache = model.bounds
        queue = look.without_queue(look.waiting, QUEUED) / self._engines
        bounds: dict[Limit, float] = {
            "growing": model.first_limit,
            "kv": kv,
            "cache": cache,
            "queue": max(queue, kv) if look.kv > FULL_KV * self._engines else queue,
            "prefill": look.without_queue(look.prefill_waiting, PREFILL_QUEUED) / self._engines,
        }
        lowest = min(bounds, key=lambda name: bounds[name])
        bound, grown = bounds[lowest], self._per_engine * GROWTH ** min(1.0, look.seconds / GROWTH_S)
        if (far := min(kv, cache) / FAR) > self._per_engine and model.settled == 1:
            shown_s = min(GROWTH_S, SHOWN_LIFETIMES * model.lifetime)
            grown = max(grown, min(far, self._per_engine * FAR_GROWTH ** min(1.0, look.seconds / shown_s)))
        if bound < self._per_engine:
            self._per_engine, self.limited_by = max(bound, FLOOR_PER_ENGINE), lowest
        elif self.speed < 1 or look.inflight < USED_SHARE * self.slots or not look.generated:
            self.limited_by = "demand"
        else:
            self._per_engine, self.limited_by = min(bound, grown), lowest if bound < grown else "growing"


class Concurrency:
    """Keeps the limits of all replicas, whose routers are named `router-<replica>`."""

    def __init__(
        self, routers: Iterable[str], engines: Iterable[str], bound: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._routers, self._bound, self._clock = list(routers), bound, clock
        self._engines = Counter(_router(name) for name in engines if not name.startswith("prefill"))
        self._model = RolloutModel()
        self._limits: dict[str, ReplicaLimit] = {}
        self._inflight: Counter[str] = Counter()
        self._evaluating: Counter[str] = Counter()
        self._last: dict[str, tuple[float, Sample]] = {}  # last answer of each engine, and its time
        self._observed_at: float | None = None
        self._without_metrics_s = 0.0

    @property
    def slots(self) -> dict[str, int]:
        """Return the limit by router. Empty if engines report no metrics: then replicas have no limit."""
        if self._without_metrics_s >= NO_METRICS_S:
            return {}
        # Dispatch starts when the first engine has the policy; others may be minutes late.
        first = {router: START_PER_ENGINE * max(1, self._engines[router]) for router in self._routers}
        return first | {router: limit.slots for router, limit in self._limits.items()}

    @property
    def report(self) -> dict[str, ReplicaLoad]:
        is_full = sum(self._inflight.values()) >= BOUND_SHARE * self._bound
        report = {}
        for router, limit in self._limits.items():
            name: Limit = "slow" if limit.speed < 1 and limit.slots else limit.limited_by
            name = "bound" if is_full and name in ("demand", "growing") else name
            report[router.rpartition("-")[2]] = ReplicaLoad(limit.slots, self._inflight[router], name)
        return report

    def drop(self, router: str) -> None:
        """Forget a replica that was given up."""
        self._routers.remove(router)
        self._limits.pop(router, None)

    def observe(
        self,
        samples: Mapping[str, Sample],
        inflight: Mapping[str, int],
        ended: Mapping[str, int],
        evaluating: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Add one look at all engines. Samples are by engine, of those that answered; rollouts are by router."""
        now = self._clock()
        seconds = 0.0 if self._observed_at is None else now - self._observed_at
        self._inflight, self._evaluating = Counter(inflight), Counter(evaluating)
        by_router: dict[str | None, dict[str, Sample]] = {router: {} for router in self._routers}
        for name, sample in samples.items():
            by_router.setdefault(_router(name), {})[name] = sample
        looks = {router: look for router in self._routers if (look := self._look(router, by_router[router], seconds))}
        self._model.observe(looks.values(), sum(inflight.values()), sum(ended.values()), seconds)
        for router, look in looks.items():
            self._limits[router].observe(look, self._model)
        self._compare_speeds()
        self._last |= {name: (now, sample) for name, sample in samples.items()}
        self._without_metrics_s = 0.0 if self._last else self._without_metrics_s + seconds * any(inflight.values())
        self._observed_at = now

    def _look(self, router: str, samples: Mapping[str, Sample], seconds: float) -> Look | None:
        """Return the metrics of a replica; None if they are incomplete."""
        sampling = [name for name in samples if not name.startswith("prefill")]
        fresh = {name for name, sample in samples.items() if self._is_fresh(name, sample)}
        if router not in self._limits:
            if sampling:
                self._limits[router] = ReplicaLimit(len(sampling))
            return None
        self._limits[router].set_engines(len(sampling), len(fresh.intersection(sampling)))
        # An engine that was missing from the last look reports its growth over two intervals. Skip this one.
        if not sampling or not seconds or fresh or any(self._last[name][0] != self._observed_at for name in samples):
            return None
        now, before = [samples[name] for name in sampling], [self._last[name][1] for name in sampling]
        waiting = _sum(now, "waiting")
        return Look(
            seconds=seconds,
            inflight=self._inflight[router],
            rollouts=self._inflight[router] + self._evaluating[router],
            running=_sum(now, "running"),
            # Requests that wait for KV from a prefill engine are not a queue of the decode engine.
            waiting=max(0.0, waiting - _sum(now, "waiting_deferred")),
            prefill_waiting=_sum(samples.values(), "waiting") - waiting,
            kv=_sum(now, "kv_usage"),
            generated=_sum(now, "generated") - _sum(before, "generated"),
            answered=_sum(now, "requests") - _sum(before, "requests"),
        )

    def _is_fresh(self, name: str, sample: Sample) -> bool:
        """Tell whether an engine restarted since its last answer, so that its counters start from zero again."""
        last = self._last.get(name)
        return last is None or any(sample.get(counter, 0.0) < last[1].get(counter, 0.0) for counter in COUNTERS)

    def _compare_speeds(self) -> None:
        """Scale down the limit of a replica that is slower than the others under the same load."""
        limits = {router: limit for router, limit in self._limits.items() if self._inflight[router]}
        rates = {router: limit.tokens_per_s for router, limit in limits.items() if limit.tokens_per_s is not None}
        rollouts = self._inflight + self._evaluating
        per_rollout = {router: rate / rollouts[router] for router, rate in rates.items()}
        if len(rates) < 2 or not (median := median_high(per_rollout.values())):
            return
        total = median_high(rates.values())
        for router, rate in rates.items():
            speed = per_rollout[router] / median
            self._limits[router].speed = speed if speed < SLOW_EACH and rate < SLOW_TOTAL * total else 1.0


def _smooth(before: float | None, value: float, seconds: float) -> float:
    return value if before is None else value + (before - value) * math.exp(-seconds / SMOOTHED_S)


def _router(engine: str) -> str | None:
    """Return the router of an engine; None for a teacher's engine, which runs no rollouts."""
    match = ENGINE.match(engine)
    return f"router-{match['replica']}" if match and match["role"] in ("prefill", "decode", "engine") else None


def _sum(samples: Iterable[Sample], field: str) -> float:
    return sum(sample.get(field, 0.0) for sample in samples)
