"""Adaptive concurrency: how many rollouts each replica may have in flight. Pure, apart from the clock.

Engines generate the most tokens per second when the KV cache just holds all rollouts in flight. With fewer, a decode
step takes as long for fewer tokens. With more, requests queue, running requests are preempted, and the prompts of
rollouts that wait for a tool are evicted and computed again. An admitted rollout cannot be withdrawn, and it grows for
its whole lifetime. So the limit follows the predicted size of rollouts, not the present use of the cache.

Control law, every ten seconds and for each replica:

    limit = min over bounds of (share of the cache / size of a rollout)

- Size (`KvOccupancy`): engines report the present size of a request, and the dispatcher the rollouts that start and
  end, so their mean age is known. The line through both is continued to half a lifetime, the mean age in a steady
  state. Until rollouts are of all ages, the size is at least what those in flight will hold after a fifth of a
  lifetime. Before any rollout has ended, lifetimes are unknown, and the limit only grows in proportion to time.
- Bounds, as reported in `ReplicaLoad.limit`:
  - kv, preemption: running requests fill the cache, up to a headroom that preemptions enlarge (`Headroom`).
  - cache: all rollouts, including those that wait for a tool, fill the cache. The share falls while prompts are
    recomputed. If a turn takes longer than computing a full cache, recomputing is cheaper than an idle engine, and
    the share is the ratio of both times.
  - queue, prefill: requests wait although the cache has room, so the engines are busy without them.
  - slow: the replica is slower than the others under the same load.
- Steps: the limit grows only while it is used, by 20 to 50 % at first and by 4 % once a bound has been reached.

An evaluation runs on the same engines beside training. Engine metrics include its requests, so they are compared with
the rollouts of both, and preemption and recomputation are ignored while it runs. The limit is for training alone.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_high
from types import MappingProxyType

from primeslurm.orchestrator.telemetry.engine_load import COUNTERS, ENGINE, Sample
from primeslurm.records.state import Limit, ReplicaLoad

# Growth of a limit, per period
START_PER_ENGINE, FLOOR_PER_ENGINE = 12, 2  # enough rollouts to measure an engine, too few to overload it
PERIOD_S = 10.0  # two looks at the engines; one look is too noisy
GROWTH, YOUNG_GROWTH, STEADY_GROWTH = 1.5, 1.2, 1.04  # rollouts of all ages, young rollouts, a bound was reached
USED_SHARE, FREE_SLOTS = 0.9, 1.0  # a limit grows only if it is used, except for a slot that was just freed

# Size of a rollout. A generation has ended when as many rollouts have ended as are in flight.
SETTLED = 1.5  # generations after which rollouts are of all ages
AHEAD = 0.2  # of a lifetime: until then, room is left for growth during this time
MIN_AHEAD, MAX_AHEAD = 0.5, 3.0  # predicted growth from the start to half a lifetime, relative to the growth so far
FIRST_S = 300.0  # before any rollout has ended, the limit grows in proportion to time, from then on
LIFETIMES, MIN_MEAN_S, MAX_MEAN_S = 12.0, 60.0, 1800.0  # the mean covers 12 lifetimes, to average over waves
SMOOTHED_S = 30.0

# Queues: waiting requests per running one that keep engines busy. Prefill gets more, as rollouts start in waves.
QUEUED, PREFILL_QUEUED = 0.1, 1.0
MIN_RUNNING = 0.5  # requests; fewer say nothing about the size of a rollout

# Share of the cache for running requests. The rest absorbs uneven growth.
MAX_KV, MIN_KV = 0.96, 0.76
HEADROOM, MAX_HEADROOM = 1.0, 1.4  # in units of sqrt(size of a request)
# A preemption enlarges the headroom, at most once a minute: a lower limit takes effect only as rollouts end.
HEADROOM_STEP, CALM_S, COOLING_S = 0.25, 300.0, 60.0

# Share of the caches for all rollouts. It may exceed 1, because some evicted blocks belong to rollouts that have ended.
IDLE_S, MOSTLY_IDLE = 300.0, 1.3  # above 1.3 rollouts per request, many wait for tools, and this bound holds
FIRST_OVERCOMMIT, MAX_OVERCOMMIT, MIN_OVERCOMMIT = 0.95, 1.1, 0.8
OVERCOMMIT_PER_S = 0.00025  # takes effect when rollouts end, minutes later; a faster change would oscillate
TESTED = 0.9  # this much of it must be in use before the absence of recomputation means anything
# Recomputed prompt tokens per generated token, above the least seen, that are worth the rollouts that cause them: a
# share of the least, plus a constant. Engines compute prompts ten to twenty times as fast as they generate.
RECOMPUTED, RECOMPUTED_TOKENS, COMPUTED_S = 0.15, 0.3, 30.0
BASELINE_UP_PER_S = 0.00005  # the least seen rises slowly, because the work changes while the policy learns
# Time to compute the prompt tokens of a full cache [s]: 400,000 tokens at 20,000 tokens/s, an 8B model on an H100
REFILL_S, TURNS_S = 20.0, 300.0

SOME_TOKENS = 1e-100  # per second: without new tokens, a smoothed rate shrinks but does not become zero
SLOW_EACH, SLOW_TOTAL = 0.5, 0.8  # a slow replica is below these shares of the median rate, per rollout and in total
FEW_EVALUATING = 0.05  # with more evaluation rollouts per training rollout, nothing is learned
BOUND_SHARE = 0.95  # from this share of `max_inflight_rollouts` on, that bound is reported as the limit
NO_METRICS_S = 60.0  # engines that report no metric this long after the first rollout never will
ROLES = ("prefill", "decode", "engine")  # a teacher's engines run no rollouts


@dataclass(frozen=True)
class ReplicaMetrics:
    """Metrics of a replica's engines over a time span."""

    seconds: float
    ended: int  # training rollouts since the start of the run
    # Means
    inflight: float  # training rollouts
    rollouts: float  # training and evaluation rollouts
    running: float  # requests on engines that sample
    requests: float  # running and waiting
    kv: float  # used share of the KV cache, mean over the engines that sample
    # Minima
    waiting: float  # requests for which the engines that sample have no room
    prefill_waiting: float
    # Sums
    generated: float  # tokens
    computed: float  # prompt tokens
    preempted: float  # requests
    answered: float  # requests

    @classmethod
    def combine(cls, looks: Sequence[ReplicaMetrics]) -> ReplicaMetrics:
        seconds = sum(look.seconds for look in looks)
        means = ("inflight", "rollouts", "running", "requests", "kv")
        sums = ("generated", "computed", "preempted", "answered")
        return cls(
            seconds=seconds,
            ended=looks[-1].ended,
            waiting=min(look.waiting for look in looks),
            prefill_waiting=min(look.prefill_waiting for look in looks),
            **{name: sum(getattr(look, name) * look.seconds for look in looks) / seconds for name in means},
            **{name: sum(getattr(look, name) for look in looks) for name in sums},
        )

    def without_queue(self, waiting: float, queued: float) -> float:
        """Return the rollouts with which only `queued` requests would wait per running request."""
        spare = queued * self.running + 1
        return self.rollouts - (waiting - spare / 2) if waiting > spare else math.inf


class KvOccupancy:
    """Predicts the share of an engine's KV cache that a rollout holds, on average over its lifetime.

    `replicas` are the estimates of all replicas, this one included. They share what they learn, because a replica alone
    has too few rollouts to average over where lengths differ much.
    """

    def __init__(self, replicas: Collection[KvOccupancy]) -> None:
        self._replicas = replicas
        # Decaying sums: rollout-seconds, rollouts that ended, request-seconds, and predicted size times request-seconds
        self._time = self._ended = self._requests = self._kv = 0.0
        self._total_ended: int | None = None
        self._first_ended = 0
        self._elapsed = self._done = self._rise = 0.0
        self._now: float | None = None
        self._start = math.inf  # size of the youngest rollouts, the least seen
        self._started: deque[tuple[float, float]] = deque()  # rollouts in flight by start: time, number

    def add(self, kv: float, running: float, inflight: float, ended: int, seconds: float) -> None:
        """Add an observation: `kv` caches are in use by `running` requests; `ended` rollouts ended since the start."""
        if self._total_ended is None:
            self._total_ended = self._first_ended = ended
        new, self._total_ended = ended - self._total_ended, ended
        age = self._track_ages(inflight, new, seconds)
        memory_s = max(LIFETIMES * self.lifetime, MIN_MEAN_S)
        decay = math.exp(-seconds / memory_s)
        self._time = self._time * decay + inflight * seconds
        self._ended = self._ended * decay + new
        each = kv / running
        self._now = _smooth(each if self._now is None else self._now, each, seconds / SMOOTHED_S)
        self._start = min(self._start, each)
        self._rise = AHEAD * self.lifetime * (self._now - self._start) / age
        start = min(other._start for other in self._replicas)
        ahead = min(MAX_AHEAD, max(MIN_AHEAD, max(self.lifetime, seconds) / 2 / age))
        # Observations from the time before lifetimes were known do not count.
        decay = math.exp(-seconds / min(memory_s, MAX_MEAN_S)) if self.first_limit == math.inf else 0.0
        self._kv = self._kv * decay + (start + (each - start) * ahead) * running * seconds
        self._requests = self._requests * decay + running * seconds

    def _track_ages(self, inflight: float, ended: float, seconds: float) -> float:
        """Follow starts and ends, and return the mean age. The oldest are taken to end first, which keeps the mean."""
        self._elapsed += seconds
        over = sum(number for _, number in self._started) - inflight
        self._started.append((self._elapsed - seconds / 2, max(0.0, ended - over)))
        over = max(over, ended)
        while self._started and over >= self._started[0][1]:
            over -= self._started.popleft()[1]
        if self._started:
            self._started[0] = self._started[0][0], self._started[0][1] - over
        ages = [(self._elapsed - at, number) for at, number in self._started]
        # A rollout in flight counts as a part of one that ended: its age in lifetimes, at most a half.
        lifetime = self.lifetime
        self._done = sum(number * min(0.5, age / lifetime if lifetime else 0.5) for age, number in ages)
        return max(seconds / 2, sum(age * number for age, number in ages) / max(1e-9, inflight))

    @property
    def lifetime(self) -> float:
        """Return the mean lifetime of a rollout in all replicas [s]."""
        ended = sum(each._ended + each._done for each in self._replicas)
        return sum(each._time for each in self._replicas) / max(1e-9, ended)

    @property
    def mean(self) -> float:
        """Return the predicted mean size over a lifetime, of all replicas."""
        return max(1e-9, sum(each._kv for each in self._replicas) / sum(each._requests for each in self._replicas))

    @property
    def first_limit(self) -> float:
        """Return the limit per engine before any rollout has ended."""
        if any((each._total_ended or 0) > each._first_ended for each in self._replicas):
            return math.inf
        return START_PER_ENGINE * max(1.0, max(each._elapsed for each in self._replicas) / FIRST_S)

    def settled_fraction(self, inflight: float) -> float:
        """Return how close the rollouts in flight are to a mix of all ages, 0 to 1."""
        return min(1.0, ((self._total_ended or 0) - self._first_ended) / (SETTLED * inflight))

    def size(self, inflight: float) -> float:
        """Return the size to plan with: the mean, and until rollouts are of all ages, what they will hold soon."""
        settled = self.settled_fraction(inflight)
        soon = fmean(each._now + each._rise for each in self._replicas if each._now is not None)
        return self.mean * settled + max(self.mean, soon) * (1 - settled)


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
        self.speed = 1.0
        self.overcommit = FIRST_OVERCOMMIT  # share of the caches for all rollouts
        self._occupancy, self._headroom, self._peers = occupancy, Headroom(), peers
        self._limited_by: Limit = "growing"
        self._engines = engines
        self._cap = float(START_PER_ENGINE * engines)
        self._per_engine = float(START_PER_ENGINE)
        self._looks: list[ReplicaMetrics] = []
        self._is_fresh = True  # no rate of generation is known
        self._is_found = False  # the limit has reached what fits the cache
        self._idle: float | None = None  # rollouts per request, smoothed
        # Decaying sums of tokens and turns; the least recomputation and the shortest turn seen
        self._generated = self._computed = self._turn_time = self._turns = self._observed_s = 0.0
        self._least_recomputed = self._turn_s = math.inf

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
        self._engines, self._is_found, self._looks = answering, False, []
        if fresh:
            self.generated_per_s, self.speed, self._is_fresh = 0.0, 1.0, True

    def observe(self, look: ReplicaMetrics) -> None:
        self._looks.append(look)
        if sum(each.seconds for each in self._looks) >= PERIOD_S and len(self._looks) > 1:
            period, self._looks = ReplicaMetrics.combine(self._looks), []
            self._decide(period)

    def _decide(self, period: ReplicaMetrics) -> None:
        rate = period.generated / period.seconds
        # Starts with the first value, so that a replica that has just started is not taken for a slow one.
        last = rate if self._is_fresh else self.generated_per_s
        self.generated_per_s, self._is_fresh = _smooth(last, rate, period.seconds / SMOOTHED_S), False
        if period.inflight < 1:
            return
        is_used = self.speed == 1 and period.inflight >= USED_SHARE * self._cap - FREE_SLOTS
        if period.running < MIN_RUNNING:
            # Nearly all rollouts wait for tools, so their size is unknown; it will show once requests run.
            if period.waiting + period.prefill_waiting < 1 and period.generated > 0 and is_used:
                self._cap, self._limited_by = self._cap * GROWTH, "growing"
            return
        self._occupancy.add(period.kv * self._engines, period.running, period.inflight, period.ended, period.seconds)
        size = self._occupancy.size(period.inflight)
        usable = self._headroom.usable(size)
        self._learn(period, usable)
        bounds = self._bounds(period, size, usable)
        limit = min(bounds, key=lambda name: bounds[name])
        wanted = bounds[limit]
        steady = 1 + (STEADY_GROWTH - 1) * period.seconds / PERIOD_S
        if wanted < self._cap:
            if limit in ("kv", "preemption", "cache"):
                wanted = max(wanted, self._cap * (2 - steady)) if self._is_found else wanted
                self._is_found = True
            self._cap, self._limited_by = max(wanted, 1.0 * FLOOR_PER_ENGINE * self._engines), limit
        elif is_used:
            settled = self._occupancy.settled_fraction(period.inflight)
            most = self._cap * (steady if self._is_found else YOUNG_GROWTH + (GROWTH - YOUNG_GROWTH) * settled)
            self._cap, self._limited_by = min(wanted, most), limit if wanted < most else "growing"
        else:
            self._limited_by = "demand"

    def _learn(self, period: ReplicaMetrics, usable: float) -> None:
        """Adjust the headroom to preemptions, and the overcommitment to recomputation."""
        self._observed_s += period.seconds
        decay = math.exp(-period.seconds / TURNS_S)
        self._turn_time = self._turn_time * decay + period.rollouts * period.seconds
        self._turns = self._turns * decay + period.answered
        if self._observed_s > TURNS_S and self._turns:
            self._turn_s = min(self._turn_s, self._turn_time / self._turns)  # queues only make turns longer
        if period.rollouts > (1 + FEW_EVALUATING) * period.inflight:
            return
        held = period.rollouts * self._occupancy.mean / self._engines
        # A preemption above the wanted fill proves nothing: it is known that there are too many rollouts.
        preempted = period.preempted > 0 and held <= usable * 1.05
        self._headroom.learn(self._occupancy.settled_fraction(period.inflight) if preempted else 0.0, period.seconds)
        recomputed = self._recomputed(period) if held >= MIN_OVERCOMMIT / 2 else 0.0  # else the prompts are new
        if recomputed > 1 or held > TESTED * self._shared_overcommit:
            change = OVERCOMMIT_PER_S * period.seconds * max(-2.0, 1 - recomputed)
            self.overcommit = min(MAX_OVERCOMMIT, max(MIN_OVERCOMMIT, self.overcommit + change))

    def _recomputed(self, period: ReplicaMetrics) -> float:
        """Return the recomputed tokens as a multiple of the number that is worth it."""
        decay = math.exp(-period.seconds / COMPUTED_S)
        self._generated = self._generated * decay + period.generated
        self._computed = self._computed * decay + period.computed
        if self._generated < 1:
            return 0.0
        ratio = self._computed / self._generated
        least = min(ratio, self._least_recomputed * (1 + BASELINE_UP_PER_S * period.seconds))
        self._least_recomputed = least
        return (ratio - least) / (RECOMPUTED * least + RECOMPUTED_TOKENS)

    @property
    def _shared_overcommit(self) -> float:
        return fmean(each.overcommit for each in self._peers)

    def _bounds(self, period: ReplicaMetrics, size: float, usable: float) -> dict[Limit, float]:
        idle = period.rollouts / period.requests
        fit = usable * self._engines / size * max(1.0, idle)
        queue = period.without_queue(period.waiting, QUEUED)
        bounds: dict[Limit, float] = {
            "growing": self._occupancy.first_limit * self._engines,
            "preemption" if self._headroom.is_raised else "kv": fit,
            # With a full cache, requests that wait for room fit on average, and keep it full.
            "queue": queue if period.kv < MIN_KV else max(queue, fit),
            "prefill": period.without_queue(period.prefill_waiting, PREFILL_QUEUED),
        }
        self._idle = idle if self._idle is None else _smooth(self._idle, idle, period.seconds / IDLE_S)
        if self._idle > MOSTLY_IDLE:
            refilled = self._turn_s / REFILL_S if self._turn_s < math.inf else 0.0
            cached = max(self._shared_overcommit / size, refilled / self._occupancy.mean)
            bounds["cache"] = cached * self._engines
        return bounds


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
        running = _sum(decode, "running")
        # Requests that wait for KV from a prefill engine are not a queue of the decode engine.
        waiting = _sum(decode, "waiting") - _sum(decode, "waiting_deferred")
        prefill_waiting = _sum(samples.values(), "waiting") - _sum(decode, "waiting")
        limit.observe(
            ReplicaMetrics(
                seconds=now - self._observed_at,
                ended=ended,
                inflight=self._inflight[replica],
                rollouts=self._inflight[replica] + self._evaluating[replica],
                running=running,
                requests=running + max(0.0, waiting + prefill_waiting),
                kv=_sum(decode, "kv_usage") / len(decode),
                waiting=waiting,
                prefill_waiting=prefill_waiting,
                generated=growth["generated"],
                computed=growth["computed"],
                preempted=growth["preemptions"],
                answered=_sum(decode, "requests") - _sum((self._last[name][1] for name in sampling), "requests"),
            )
        )

    def _is_fresh(self, name: str, sample: Sample) -> bool:
        """Tell whether an engine restarted since its last answer, so that its counters start from zero again."""
        last = self._last.get(name)
        return last is None or any(sample.get(counter, 0.0) < last[1].get(counter, 0.0) for counter in COUNTERS)

    def _compare_speeds(self) -> None:
        """Scale down the limit of a replica that is slower than the others under the same load."""
        generating = {name: limit for name, limit in self._limits.items() if limit.generated_per_s > SOME_TOKENS}
        busy = {name: limit for name, limit in generating.items() if self._inflight[name]}
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


def _smooth(before: float, value: float, time_constants: float) -> float:
    return value + (before - value) * math.exp(-time_constants)


def _rollout_engine(name: str) -> re.Match[str] | None:
    match = ENGINE.match(name)
    return match if match and match["role"] in ROLES else None


def _samples(name: str) -> bool:
    return not name.startswith("prefill")


def _sum(samples: Iterable[Sample], name: str) -> float:
    return sum(sample.get(name, 0.0) for sample in samples)
