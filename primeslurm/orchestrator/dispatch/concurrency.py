"""Adaptive concurrency: how many rollouts each replica may have in flight. Pure, apart from the clock.

Engines generate the most tokens per second when the KV cache just holds all rollouts in flight. With fewer rollouts, a
decode step takes as long for fewer tokens. With more, requests queue, running requests are preempted, and the prompts
of rollouts that wait for a tool are evicted and computed again.

`Concurrency` reads the metrics of all engines and keeps one `ReplicaLimit` per replica. A limit grows until one of
these bounds stops it; `ReplicaLoad.limit` reports which one:

- kv, preemption: running requests fill the cache, up to a headroom that preemptions enlarge (`Headroom`).
- cache: all rollouts, including those that wait for a tool, fill the cache (`ReplicaLimit.overcommit`).
- queue, prefill: requests wait although the cache has room, so the engines are busy without them.
- slow: the replica is slower than the others under the same load.

A rollout's size in the cache is estimated over its lifetime (`KvOccupancy`). An evaluation runs on the same engines
beside training. Engine metrics include its requests, so they are compared with the rollouts of both, and preemption
and recomputation are ignored while it runs. The limit itself is for training alone.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from types import MappingProxyType

from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, ENGINE, Sample
from primeslurm.records.state import Limit, ReplicaLoad

# Growth of a limit, per engine and period.
START_PER_ENGINE, FLOOR_PER_ENGINE = 16, 2  # enough rollouts to measure an engine, too few to overload it
PERIOD_S = 10.0  # two looks at the engines; one look is too noisy
GROWTH = 1.5  # per period, while the cache has room
YOUNG_GROWTH = 0.2  # before rollouts have ended: they started together, and come back in waves
STEADY_GROWTH = 0.04  # after the right limit was found, to follow drift
USED_SHARE, FREE_SLOTS = 0.9, 1.0  # a limit grows only if it is used, except for a slot that was just freed

# Queues: waiting requests per running one that keep engines busy. Prefill gets more, as rollouts start in waves.
QUEUED, PREFILL_QUEUED = 0.1, 1.0
MIN_RUNNING = 0.5  # requests; fewer say nothing about the size of a rollout
IDLE_S, MOSTLY_IDLE = 300.0, 1.3  # above 1.3 rollouts per running request, many wait for tools
# Running requests should hold this share of the cache even at the price of evictions: a decode step for few requests
# takes nearly as long. It holds in full after BUSY_SETTLED generations, because young rollouts take short turns.
BUSY_KV, BUSY_SETTLED = 0.2, 2.0

# Recomputed prompt tokens per generated token, above the least seen, that are worth the rollouts that cause them: a
# share of the least, plus a constant. Engines compute prompts ten to twenty times as fast as they generate.
RECOMPUTED, RECOMPUTED_TOKENS, COMPUTED_S = 0.15, 0.3, 30.0
BASELINE_UP_PER_S = 0.00005  # the least seen rises slowly, because the work changes while the policy learns

# Size of a rollout. A generation has ended when as many rollouts have ended as are in flight.
YOUNG = 3.0  # expected growth of a rollout before any has ended
UNSURE, FEW = 0.25, 3.0  # margin over the mean until 3 generations have ended: it has too many young rollouts
SETTLED = 10.0  # generations after which rollouts are of all ages, and no trend is extrapolated
TREND_S, AHEAD = 120.0, 1.5  # until then, the size is extrapolated by 1.5 times its rise over two minutes
LIFETIMES, MIN_MEAN_S, MAX_MEAN_S = 12.0, 60.0, 1800.0  # the mean covers 12 lifetimes, to average over waves
SMOOTHED_S = 30.0

# Share of the cache for running requests. The rest absorbs uneven growth.
MAX_KV, MIN_KV = 0.96, 0.76
HEADROOM, MAX_HEADROOM = 1.0, 1.4  # in units of sqrt(size of a request)
# A preemption enlarges the headroom, at most once a minute: a lower limit takes effect only as rollouts end.
HEADROOM_STEP, CALM_S, COOLING_S = 0.25, 300.0, 60.0

# Share of the caches for all rollouts. It may exceed 1, because some evicted blocks belong to rollouts that have ended.
FIRST_OVERCOMMIT, MAX_OVERCOMMIT, MIN_OVERCOMMIT = 0.95, 1.1, 0.6
OVERCOMMIT_PER_S = 0.00025  # takes effect when rollouts end, minutes later; a faster change would oscillate
TESTED = 0.9  # this much of it must be in use before the absence of recomputation means anything

SLOW_EACH, SLOW_TOTAL = 0.5, 0.8  # a slow replica is below these shares of the median rate, per rollout and in total
FEW_EVALUATING = 0.05  # with more evaluation rollouts per training rollout, nothing is learned
BOUND_SHARE = 0.95  # from this share of `max_inflight_rollouts` on, that bound is reported as the limit
NO_METRICS_S = 60.0  # engines that report no metric this long after the first rollout never will
ROLES = ("prefill", "decode", "engine")  # a teacher's engines run no rollouts


@dataclass(frozen=True)
class ReplicaSample:
    """Metrics of a replica's engines since the previous look."""

    seconds: float
    inflight: float  # training rollouts
    evaluating: float  # evaluation rollouts
    ended: int  # training rollouts since the start of the run
    running: float  # requests on engines that sample
    waiting: float  # requests for which these have no room
    prefill_waiting: float
    kv: float  # used share of the KV cache, mean over the engines that sample
    generated: float  # tokens
    computed: float  # prompt tokens
    preempted: float  # requests


class _Period:
    """Metrics of a replica's engines between two decisions: time-weighted means, sums and minima."""

    def __init__(self, samples: Sequence[ReplicaSample]) -> None:
        self.seconds = sum(each.seconds for each in samples)

        def mean(name: str) -> float:
            return float(sum(getattr(each, name) * each.seconds for each in samples) / self.seconds)

        self.inflight, self.running, self.kv = mean("inflight"), mean("running"), mean("kv")
        self.ended = samples[-1].ended
        self.generated = float(sum(each.generated for each in samples))
        self.computed = float(sum(each.computed for each in samples))
        self.preempted = float(sum(each.preempted for each in samples))
        self.min_waiting = min(each.waiting for each in samples)
        self.min_prefill_waiting = min(each.prefill_waiting for each in samples)
        self.min_waiting_anywhere = min(each.waiting + each.prefill_waiting for each in samples)
        self.rollouts = self.inflight + mean("evaluating")
        self.is_training_alone = self.rollouts <= (1 + FEW_EVALUATING) * self.inflight
        self.requests = self.running + max(0.0, mean("waiting") + mean("prefill_waiting"))


class KvOccupancy:
    """Estimates the share of an engine's KV cache that one rollout holds.

    `replicas` are the estimates of all replicas, this one included. They share their mean, because a replica alone has
    too few rollouts to average over where lengths differ much.
    """

    def __init__(self, replicas: Collection[KvOccupancy]) -> None:
        self._replicas = replicas
        self._time = self._requests = self._kv = self._ended = 0.0
        self._last_ended: int | None = None
        self._total_ended = 0
        self._now = self._trend = 0.0

    def add(self, kv: float, running: float, inflight: float, ended: int, seconds: float) -> None:
        """Add an observation: `kv` caches are in use by `running` requests; `ended` rollouts ended since the start."""
        lifetime = self._time / self._ended if self._ended else MAX_MEAN_S
        decay = math.exp(-seconds / min(max(LIFETIMES * lifetime, MIN_MEAN_S), MAX_MEAN_S))
        new = ended - self._last_ended if self._last_ended is not None else 0
        self._last_ended = ended
        self._total_ended += new
        self._time = self._time * decay + inflight * seconds
        self._kv = self._kv * decay + kv * seconds
        self._requests = self._requests * decay + running * seconds
        self._ended = self._ended * decay + new
        self._now = _smooth(self._now, kv / running, seconds / SMOOTHED_S)
        self._trend = _smooth(self._trend, kv / running, seconds / TREND_S)

    @property
    def mean(self) -> float:
        """Return the mean over the last lifetimes of rollouts, of all replicas."""
        return sum(each._kv for each in self._replicas) / sum(each._requests for each in self._replicas)

    def settled_fraction(self, inflight: float, generations: float = SETTLED) -> float:
        """Return how close the rollouts in flight are to a mix of all ages, 0 to 1."""
        return min(1.0, self._total_ended / (generations * inflight))

    def present(self, inflight: float) -> float:
        """Return what a rollout holds now; the mean once rollouts are of all ages."""
        settled = self.settled_fraction(inflight)
        return max(1e-9, self.mean * settled + max(self.mean, self._now) * (1 - settled))

    def expected(self, inflight: float) -> float:
        """Return what a rollout will hold on average over its lifetime."""
        mean = self.mean
        growing = max(mean, self._now + AHEAD * (self._now - self._trend))
        old, settled = self.settled_fraction(inflight, 1.0), self.settled_fraction(inflight)
        young = max(mean, self._now) * YOUNG
        later = (mean * settled + growing * (1 - settled)) * (1 + UNSURE * (1 - self.settled_fraction(inflight, FEW)))
        return max(1e-9, young * (1 - old) + old * later)


class Headroom:
    """The part of a KV cache that is kept free, so that running requests rarely outgrow it.

    The sum of n sizes that grow and end independently varies by the square root of n, as in the staffing of servers
    (Halfin and Whitt, 1981). The free part is that root times a factor, which preemptions raise.
    """

    def __init__(self) -> None:
        self._factor = HEADROOM
        self._cooling_s = 0.0

    @property
    def is_raised(self) -> bool:
        return self._factor > HEADROOM

    def usable(self, each: float) -> float:
        """Return the share of the cache that requests may fill if each holds `each`."""
        return min(MAX_KV, max(MIN_KV, 1 - self._factor * math.sqrt(each)))

    def learn(self, preempted: float, seconds: float) -> None:
        """Adjust to preemptions. `preempted`: 0 for none; up to 1, by how much they prove."""
        self._cooling_s -= seconds
        if preempted and self._cooling_s <= 0:
            self._cooling_s = COOLING_S
            self._factor = min(MAX_HEADROOM, self._factor + HEADROOM_STEP * preempted)
        elif not preempted:
            self._factor = max(HEADROOM, self._factor - HEADROOM_STEP * seconds / CALM_S)


class ReplicaLimit:
    """The limit of one replica. `engines` sample on it; `peers` are the limits of all replicas, this one included."""

    def __init__(self, engines: int, occupancy: KvOccupancy, peers: Collection[ReplicaLimit]) -> None:
        self.generated_per_s = 0.0
        # Share of the caches that all rollouts should hold, including those that wait for a tool
        self.overcommit = FIRST_OVERCOMMIT
        self._occupancy, self._headroom, self._peers = occupancy, Headroom(), peers
        self._limited_by: Limit = "growing"
        self._engines = engines
        self._cap = float(START_PER_ENGINE * engines)
        self._per_engine = float(START_PER_ENGINE)
        self.speed = 1.0
        self._samples: list[ReplicaSample] = []
        self._generated: float | None = None
        self._recomputation = _Recomputation()
        # The limit has reached what fits the cache
        self._is_found = False
        # Rollouts per running request, smoothed
        self._idle: float | None = None

    @property
    def slots(self) -> int:
        # At least one: without any rollout, nothing would show that a slow replica has recovered.
        return max(1, int(self._cap * self.speed)) if self._cap else 0

    @property
    def limited_by(self) -> Limit:
        return "slow" if self.speed < 1 and self._engines else self._limited_by

    def set_engines(self, answering: int, fresh: int = 0) -> None:
        """Set how many engines that sample answer, and how many of them have just started with an empty cache."""
        if answering == self._engines and not fresh:
            return
        # The share of a lost engine is removed at once; its requests would queue on the others.
        self._per_engine = self._cap / self._engines if self._engines else self._per_engine
        self._cap = (answering - fresh) * self._per_engine + fresh * min(self._per_engine, START_PER_ENGINE)
        self._limited_by = "growing" if answering else "lost"
        self._engines = answering
        self._is_found = False
        self._samples = []
        if fresh:
            self.generated_per_s, self.speed, self._generated = 0.0, 1.0, None

    def observe(self, sample: ReplicaSample) -> None:
        self._samples.append(sample)
        if sum(each.seconds for each in self._samples) >= PERIOD_S and len(self._samples) > 1:
            period, self._samples = _Period(self._samples), []
            self._decide(period)

    def _decide(self, period: _Period) -> None:
        rate = period.generated / period.seconds
        # Starts with the first value, so that a replica that has just started is not taken for a slow one.
        last = rate if self._generated is None else self._generated
        self.generated_per_s = self._generated = _smooth(last, rate, period.seconds / SMOOTHED_S)
        if period.inflight < 1:
            return
        if period.running < MIN_RUNNING:
            # Nearly all rollouts wait for tools, so their size is unknown; it will show once requests run.
            if period.min_waiting_anywhere < 1 and period.generated > 0 and self._is_used(period):
                self._cap, self._limited_by = self._cap * GROWTH, "growing"
            return
        self._occupancy.add(period.kv * self._engines, period.running, period.inflight, period.ended, period.seconds)
        each = self._occupancy.expected(period.inflight)
        usable = self._headroom.usable(each)
        self._learn(period, usable)
        bounds = self._bounds(period, each, usable)
        limit = min(bounds, key=lambda name: bounds[name])
        if bounds[limit] < self._cap:
            self._shrink(period, limit, bounds[limit], each)
        elif self._is_used(period):
            self._grow(period, limit, bounds[limit])
        else:
            self._limited_by = "demand"

    def _learn(self, period: _Period, usable: float) -> None:
        if not period.is_training_alone:
            return
        recomputed = self._recomputation.add(period)
        held = period.rollouts * self._occupancy.mean / self._engines
        if held < MIN_OVERCOMMIT / 2:
            recomputed = 0.0  # nothing was evicted: the prompts are new
        # A preemption above the wanted fill proves nothing: it is known that there are too many rollouts.
        preempted = period.preempted > 0 and held <= usable * 1.05
        self._headroom.learn(self._occupancy.settled_fraction(period.inflight) if preempted else 0.0, period.seconds)
        if recomputed > 1 or held > TESTED * self._shared_overcommit:
            change = OVERCOMMIT_PER_S * period.seconds * max(-2.0, 1 - recomputed)
            self.overcommit = min(MAX_OVERCOMMIT, max(MIN_OVERCOMMIT, self.overcommit + change))

    @property
    def _shared_overcommit(self) -> float:
        return sum(each.overcommit for each in self._peers) / len(self._peers)

    def _bounds(self, period: _Period, each: float, usable: float) -> dict[Limit, float]:
        idle = period.rollouts / period.requests
        fit = usable * self._engines / each * max(1.0, idle)
        queue = _without_queue(period.min_waiting, period, QUEUED)
        bounds: dict[Limit, float] = {
            "preemption" if self._headroom.is_raised else "kv": fit,
            # With a full cache, requests that wait for room fit on average, and keep it full.
            "queue": queue if period.kv < MIN_KV else max(queue, fit),
            "prefill": _without_queue(period.min_prefill_waiting, period, PREFILL_QUEUED),
        }
        self._idle = idle if self._idle is None else _smooth(self._idle, idle, period.seconds / IDLE_S)
        if self._idle > MOSTLY_IDLE:
            busy = BUSY_KV * self._idle * self._occupancy.settled_fraction(period.inflight, BUSY_SETTLED)
            bounds["cache"] = max(self._shared_overcommit, busy) * self._engines / each
        return bounds

    def _shrink(self, period: _Period, limit: Limit, wanted: float, each: float) -> None:
        if limit in ("kv", "preemption", "cache"):
            # Expected growth stops the limit from growing; only what rollouts hold now makes it fall.
            present = wanted * each / self._occupancy.present(period.inflight)
            lowest = self._cap * (1 - STEADY_GROWTH * period.seconds / PERIOD_S) if self._is_found else 0.0
            wanted = min(self._cap, max(wanted, present, lowest))
            self._is_found = True
        self._cap, self._limited_by = max(wanted, 1.0 * FLOOR_PER_ENGINE * self._engines), limit

    def _grow(self, period: _Period, limit: Limit, wanted: float) -> None:
        settled = self._occupancy.settled_fraction(period.inflight)
        growth = YOUNG_GROWTH * (1 - settled) + (GROWTH - 1) * settled
        if self._is_found:
            growth = STEADY_GROWTH * period.seconds / PERIOD_S
        self._limited_by = limit if wanted < self._cap * (1 + growth) else "growing"
        self._cap = min(wanted, self._cap * (1 + growth))

    def _is_used(self, period: _Period) -> bool:
        return self.speed == 1 and period.inflight >= USED_SHARE * self._cap - FREE_SLOTS


class Concurrency:
    """Keeps the limits of all replicas, whose routers are named `router-<replica>`."""

    def __init__(
        self,
        routers: Iterable[str],
        engines: Iterable[str],
        bound: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routers = {router.rpartition("-")[2]: router for router in routers}
        self._engines = Counter(
            match["replica"] for name in engines if (match := _rollout_engine(name)) and _samples(name)
        )
        self._bound = bound
        self._clock = clock
        self._limits: dict[str, ReplicaLimit] = {}
        self._occupancy: dict[str, KvOccupancy] = {}
        self._inflight: dict[str, int] = {}
        self._evaluating: dict[str, int] = {}
        # The last answer of each engine, and its time
        self._last: dict[str, tuple[float, Sample]] = {}
        self._observed_at: float | None = None
        # When rollouts were first seen in flight
        self._began_at: float | None = None

    @property
    def slots(self) -> dict[str, int]:
        """Return the limit by router. Empty if engines report no metrics: then replicas have no limit."""
        began_at = self._observed_at if self._began_at is None else self._began_at
        if not self._last and (self._observed_at or 0.0) - (began_at or 0.0) >= NO_METRICS_S:
            return {}
        # Dispatch starts when the first engine has the policy; others may be minutes late.
        slots = {replica: limit.slots for replica, limit in self._limits.items()}
        return {
            router: slots.get(replica, START_PER_ENGINE * max(1, self._engines[replica]))
            for replica, router in self._routers.items()
        }

    @property
    def report(self) -> dict[str, ReplicaLoad]:
        is_full = sum(self._inflight.values()) >= BOUND_SHARE * self._bound
        return {
            replica: ReplicaLoad(
                limit.slots,
                self._inflight.get(replica, 0),
                "bound" if is_full and limit.limited_by in ("demand", "growing") else limit.limited_by,
            )
            for replica, limit in self._limits.items()
        }

    def drop(self, router: str) -> None:
        replica = router.rpartition("-")[2]
        for table in (self._limits, self._occupancy, self._inflight, self._evaluating, self._routers):
            table.pop(replica, None)

    def observe(
        self,
        samples: Mapping[str, Sample],
        inflight: Mapping[str, int],
        ended: Mapping[str, int],
        evaluating: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Add one look at all engines. Samples are by engine, of those that answered; rollouts are by router."""
        now = self._clock()
        by_replica: dict[str, dict[str, Sample]] = {}
        for name, sample in samples.items():
            if match := _rollout_engine(name):
                by_replica.setdefault(match["replica"], {})[name] = sample
        for replica, router in self._routers.items():
            self._inflight[replica] = inflight.get(router, 0)
            self._evaluating[replica] = evaluating.get(router, 0)
            self._observe_replica(replica, by_replica.get(replica, {}), now, ended.get(router, 0))
        self._compare_speeds()
        self._last |= {name: (now, sample) for name, sample in samples.items()}
        self._observed_at = now
        if self._began_at is None and any(self._inflight.values()):
            self._began_at = now

    def _observe_replica(self, replica: str, samples: Mapping[str, Sample], now: float, ended: int) -> None:
        sampling = {name for name in samples if _samples(name)}
        limit = self._limits.get(replica)
        if limit is None:
            if sampling:
                occupancy = self._occupancy[replica] = KvOccupancy(self._occupancy.values())
                self._limits[replica] = ReplicaLimit(len(sampling), occupancy, self._limits.values())
            return
        limit.set_engines(len(sampling), sum(self._is_fresh(name, samples[name]) for name in sampling))
        if not sampling or any(self._is_fresh(name, sample) for name, sample in samples.items()):
            return
        # An engine that was missing from the last observation reports its growth over two intervals. Skip this one.
        if self._observed_at is None or any(self._last[name][0] != self._observed_at for name in samples):
            return
        last = [self._last[name][1] for name in samples]
        growth = {name: _sum(samples.values(), name) - _sum(last, name) for name in COUNTERS}
        decode = [samples[name] for name in sampling]
        limit.observe(
            ReplicaSample(
                seconds=now - self._observed_at,
                inflight=self._inflight[replica],
                evaluating=self._evaluating[replica],
                ended=ended,
                running=_sum(decode, "running"),
                # Requests that wait for KV from a prefill engine are not a queue of the decode engine.
                waiting=_sum(decode, "waiting") - _sum(decode, "waiting_deferred"),
                prefill_waiting=_sum(samples.values(), "waiting") - _sum(decode, "waiting"),
                kv=_sum(decode, "kv_usage") / len(decode),
                generated=growth["generated"],
                computed=growth["computed"],
                preempted=growth["preemptions"],
            )
        )

    def _is_fresh(self, name: str, sample: Sample) -> bool:
        """Tell whether an engine restarted since its last answer, so that its counters start from zero again."""
        last = self._last.get(name)
        return last is None or any(sample.get(counter, 0.0) < last[1].get(counter, 0.0) for counter in COUNTERS)

    def _compare_speeds(self) -> None:
        """Scale down the limit of a replica that is slower than the others under the same load."""
        busy = {name: limit for name, limit in self._limits.items() if limit.generated_per_s and self._inflight[name]}
        if len(busy) < 2:
            return
        total = median_high(limit.generated_per_s for limit in busy.values())
        per_rollout = {
            name: limit.generated_per_s / (self._inflight[name] + self._evaluating[name])
            for name, limit in busy.items()
        }
        median = median_high(per_rollout.values())
        for name, limit in busy.items():
            speed = per_rollout[name] / median
            limit.speed = speed if speed < SLOW_EACH and limit.generated_per_s < SLOW_TOTAL * total else 1.0


class _Recomputation:
    """Prompt tokens computed per token generated, compared with the least seen."""

    def __init__(self) -> None:
        self._generated = self._computed = 0.0
        self._least: float | None = None

    def add(self, period: _Period) -> float:
        """Return the recomputed tokens as a multiple of the number that is worth it."""
        decay = math.exp(-period.seconds / COMPUTED_S)
        self._generated = self._generated * decay + period.generated
        self._computed = self._computed * decay + period.computed
        if self._generated < 1:
            return 0.0
        ratio = self._computed / self._generated
        risen = 1 + BASELINE_UP_PER_S * period.seconds
        self._least = ratio if self._least is None else min(ratio, self._least * risen)
        return (ratio - self._least) / (RECOMPUTED * self._least + RECOMPUTED_TOKENS)


def _without_queue(waiting: float, period: _Period, queued: float) -> float:
    """Return the rollouts with which only `queued` requests would wait per running request."""
    spare = queued * period.running + 1
    return period.rollouts - (waiting - spare / 2) if waiting > spare else math.inf


def _smooth(before: float, value: float, time_constants: float) -> float:
    return value + (before - value) * math.exp(-time_constants)


def _rollout_engine(name: str) -> re.Match[str] | None:
    match = ENGINE.match(name)
    return match if match and match["role"] in ROLES else None


def _samples(name: str) -> bool:
    return not name.startswith("prefill")


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(sample.get(name, 0.0) for sample in samples)
