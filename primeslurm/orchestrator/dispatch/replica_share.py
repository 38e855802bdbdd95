"""How many rollouts one replica should have in flight: what its engines said goes in, a number comes out. Pure.

Engines give the most tokens a second when the KV of all rollouts in flight just fits. With fewer, decode steps take as
long for fewer tokens; with more, requests queue, running ones are preempted, and what a rollout had in the cache is
evicted while it is at its tools.

- *KV.* What a rollout holds, on average over its life, times the rollouts in flight, is kept below a share of the
  cache (`held`). It is learned from the requests that run, and stands for those that are at their tools, too.
- *Growth.* Before rollouts have ended, all are young: they are expected to grow to several times what they hold.
- *Preemption* says that the share of the cache is too high for how differently rollouts grow: it is lowered, and
  rises slowly when there is none.
- *Prompts computed anew* are what is lost of rollouts that are at their tools. Few are worth having more in flight: the
  share that all rollouts should have of the cache rises while there are fewer, and falls while there are more.
- *Requests that run* are what engines sample for. Where tools take so long that few run while all rollouts are cached,
  there may be more rollouts than are cached.
- *Queue.* What waits all the time while there is room in the cache is not needed: engines are busy without it. What
  waits for that room fits on average, and keeps it full. At prefill engines it says that they are too few: then as
  many may wait as sample.

An evaluation's rollouts have a bound of their own, and run on the same engines. KV, queues and requests that engines
show are of both, and are set against both: an engine does not say whose they are. The number is training's alone, as
the evaluation comes on top of it and goes again. What it has preempted or evicted meanwhile is nothing to learn from.

The number grows slowly until it is known what rollouts grow to, as those that begin together end together, and come
back in waves; then by half while there is room and it is used, until what fits was found: from then on it follows what
is learned of that slowly. What rollouts will hold bounds its growth, and only what they do hold makes it fall.
"""

from __future__ import annotations

import math

from primeslurm.orchestrator.dispatch.held import LEAST_HELD, LEAST_KV, SMOOTHED_S, Headroom, Held, Overcommit
from primeslurm.orchestrator.dispatch.replica_samples import Period, ReplicaSample
from primeslurm.records.state import Limit

START_PER_ENGINE = 16
"""Rollouts that an engine begins with."""
FLOOR_PER_ENGINE = 2
PERIOD_S = 10.0
"""From one decision to the next, at least."""
GROWTH, STEADY = 1.5, 0.04
"""How much it grows in a period, and how much it changes once what fits was found."""
YOUNG_GROWTH = 0.2
"""How much it grows before it is known what rollouts grow to."""
QUEUED = 0.1
"""Requests that wait beside those that run: so many keep engines busy between two ends."""
PREFILL_QUEUED = 1.0
"""Prompts that wait at prefill engines beside the requests that sample: so many keep prefill busy between the waves in
which rollouts end and begin."""
USED, LEFT = 0.9, 1.0
"""So much of the places, less one that was left just now, is in use where more rollouts would be begun."""
RECOMPUTED, RECOMPUTED_TOKENS = 0.15, 0.3
"""Prompt tokens computed for each one sampled, above the least that was seen of it: so many are worth the rollouts that
cause them, as a share of the least and in all. An engine computes prompts ten to twenty times as fast as it samples."""
BUSY_KV, BUSY_SETTLED = 0.2, 2.0
"""Requests that run should hold so much of the cache, whatever is evicted of rollouts that are at their tools: a step
for few requests takes nearly as long, and what it leaves of the time is enough to compute prompts anew. In full once so
many times the rollouts in flight have ended: young ones ask for short turns, and seem to be at their tools more."""
COMPUTED_S = 30.0
"""These are smoothed over."""
TESTED = 0.9
"""So much of the wanted share of the cache has to be in use before it says anything that nothing is computed anew."""
BASELINE_UP_PER_S = 0.00005
"""The least that was seen is forgotten slowly: work changes as the policy learns."""
LEAST_RUNNING = 0.5
"""Requests: from fewer nothing is learned of what rollouts hold."""
IDLE_S = 300.0
"""How long it takes to learn which part of rollouts is at their tools: those whose turns are late are not."""
MOSTLY_IDLE = 1.3
"""Rollouts for each request that runs: with fewer, hardly any are at their tools."""


class ReplicaShare:
    """See the module docstring.

    Args:
        engines: of the replica that sample.
        held: by its rollouts.
        overcommit: of its KV caches.
    """

    def __init__(self, engines: int, held: Held, overcommit: Overcommit) -> None:
        self.generated_per_s = 0.0
        """Tokens sampled, of late."""
        self._limit: Limit = "growing"
        self._engines = engines
        self._cap = float(START_PER_ENGINE * engines)
        self._each = float(START_PER_ENGINE)
        self._slowness = 1.0
        self._looks: list[ReplicaSample] = []
        self._held = held
        self._headroom = Headroom()
        self._overcommit = overcommit
        self._generated = _Smoothed()
        self._computed = _Computed()
        self._found = False
        """What fits the cache was reached."""
        self._idle: float | None = None
        """Rollouts for each request that runs."""

    @property
    def places(self) -> int:
        """Return how many rollouts it may have in flight: one at least, or nobody would see that it is well again."""
        return max(1, int(self._cap * self._slowness)) if self._cap else 0

    @property
    def limit(self) -> Limit:
        """Return what keeps them from being more."""
        return "slow" if self._slowness < 1 and self._engines else self._limit

    def slower(self, speed: float) -> None:
        """Take its speed beside other replicas', 0 to 1: so much of its share is left. 1: it is as fast as they are."""
        self._slowness = speed

    def engines_are(self, answering: int, fresh: int = 0) -> None:
        """Take which engines are there: the share of one that does not answer is gone at once.

        Args:
            answering: engines that sample.
            fresh: those of them that have just started, and hold nothing.
        """
        if answering == self._engines and not fresh:
            return
        self._each = self._cap / self._engines if self._engines else self._each
        self._cap = (answering - fresh) * self._each + fresh * min(self._each, START_PER_ENGINE)
        self._limit = "growing" if answering else "lost"
        self._engines = answering
        self._found = False
        self._looks = []
        if fresh:
            self.generated_per_s, self._slowness = 0.0, 1.0
            self._generated = _Smoothed()

    def look(self, look: ReplicaSample) -> None:
        """Take what engines did; decide when a period is over."""
        self._looks.append(look)
        if sum(each.seconds for each in self._looks) >= PERIOD_S and len(self._looks) > 1:
            period, self._looks = Period(self._looks), []
            self._decide(period)

    def _decide(self, period: Period) -> None:
        self.generated_per_s = self._generated.add(period.generated / period.seconds, period.seconds)
        if period.inflight < 1:
            return
        if period.running < LEAST_RUNNING:
            self._fill(period)
            return
        self._held.add(period.kv * self._engines, period.running, period.inflight, period.ended, period.seconds)
        each = self._held.expected(period.inflight)
        share = self._headroom.share(each)
        self._learn(period, share)
        wishes = self._wishes(period, each, share)
        limit = min(wishes, key=lambda name: wishes[name])
        if wishes[limit] < self._cap:
            self._bound(period, limit, wishes[limit], each)
        elif self._is_used(period):
            self._grow(period, limit, wishes[limit])
        else:
            self._limit = "demand"

    def _learn(self, period: Period, share: float) -> None:
        """Learn from what was preempted and computed anew, below this share of the cache, unless others did it."""
        if not period.alone:
            return
        recomputed = self._computed.lost(period)
        # more than is wanted: then there is too much for now, and that is known
        held = period.together * self._held.mean / self._engines
        if held < LEAST_HELD / 2:
            recomputed = 0.0  # nothing was evicted: prompts are new, or as many
        preempted = period.preempted > 0 and held <= share * 1.05
        self._headroom.learn(self._held.settled(period.inflight) if preempted else 0.0, period.seconds)
        if recomputed > 1 or held > TESTED * self._overcommit.share:
            self._overcommit.learn(recomputed, period.seconds)

    def _wishes(self, period: Period, each: float, share: float) -> dict[Limit, float]:
        """How many rollouts each limit lets in.

        Args:
            period: that is over.
            each: what a rollout holds of the cache, over its life.
            share: of the cache that requests may fill.
        """
        idle = period.together / period.busy
        running_kv: Limit = "preemption" if self._headroom.is_raised else "kv"
        fit = share * self._engines / each * max(1.0, idle)
        queue = _without(period.least_waiting, period)
        wishes: dict[Limit, float] = {
            running_kv: fit,
            "queue": queue if period.kv < LEAST_KV else max(queue, fit),
            "prefill": _without(period.least_prefill_waiting, period, PREFILL_QUEUED),
        }
        kept = math.exp(-period.seconds / IDLE_S)
        self._idle = idle if self._idle is None else self._idle * kept + idle * (1 - kept)
        if self._idle > MOSTLY_IDLE:
            busy = BUSY_KV * self._idle * self._held.settled(period.inflight, BUSY_SETTLED)
            wishes["cache"] = max(self._overcommit.share, busy) * self._engines / each
        return wishes

    def _bound(self, period: Period, limit: Limit, wanted: float, each: float) -> None:
        """Let in fewer. What they will hold bounds growth, and what they do hold takes places away."""
        if limit in ("kv", "preemption", "cache"):
            seen = wanted * each / self._held.seen(period.inflight)
            least = self._cap * (1 - STEADY * period.seconds / PERIOD_S) if self._found else 0.0
            wanted = min(self._cap, max(wanted, seen, least))
            self._found = True
        self._cap, self._limit = max(wanted, 1.0 * FLOOR_PER_ENGINE * self._engines), limit

    def _grow(self, period: Period, limit: Limit, wanted: float) -> None:
        """Let in more, up to what the limit lets in."""
        known = self._held.settled(period.inflight)
        growth = YOUNG_GROWTH * (1 - known) + (GROWTH - 1) * known
        if self._found:
            growth = STEADY * period.seconds / PERIOD_S
        self._limit = limit if wanted < self._cap * (1 + growth) else "growing"
        self._cap = min(wanted, self._cap * (1 + growth))

    def _fill(self, period: Period) -> None:
        """Let in more where hardly a request runs, as rollouts are at their tools nearly all the time.

        What they hold in the cache is not seen then, and cannot be much of it: once requests run, it is.
        """
        works = period.least_waiting_anywhere < 1 and period.generated > 0
        if works and self._is_used(period):
            self._cap, self._limit = self._cap * GROWTH, "growing"

    def _is_used(self, period: Period) -> bool:
        """Whether it would have more rollouts if it had more places."""
        return self._slowness == 1 and period.inflight >= USED * self._cap - LEFT


class _Smoothed:
    """A mean that forgets. It begins with the first value: a replica that has just begun is not slow."""

    def __init__(self) -> None:
        self._value: float | None = None

    def add(self, value: float, seconds: float) -> float:
        kept = math.exp(-seconds / SMOOTHED_S)
        self._value = value if self._value is None else self._value * kept + value * (1 - kept)
        return self._value


class _Computed:
    """Prompts that are computed anew: tokens computed for each one sampled, beside the least there was."""

    def __init__(self) -> None:
        self._generated = self._of_prompts = 0.0
        self._least: float | None = None

    def lost(self, period: Period) -> float:
        """Return how many are, beside those that are worth it: 0 if none, more than 1 if too many."""
        kept = math.exp(-period.seconds / COMPUTED_S)
        self._generated = self._generated * kept + period.generated
        self._of_prompts = self._of_prompts * kept + period.computed
        if self._generated < 1:
            return 0.0
        ratio = self._of_prompts / self._generated
        forgotten = 1 + BASELINE_UP_PER_S * period.seconds
        self._least = ratio if self._least is None else min(ratio, self._least * forgotten)
        return (ratio - self._least) / (RECOMPUTED * self._least + RECOMPUTED_TOKENS)


def _without(waiting: float, period: Period, queued: float = QUEUED) -> float:
    """Rollouts of which none would wait for long, but for a few, if as many wait now: `queued` for each that runs."""
    spare = queued * period.running + 1
    return period.together - (waiting - spare / 2) if waiting > spare else float("inf")
