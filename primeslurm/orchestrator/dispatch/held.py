"""What a rollout holds of the KV cache on average over its life, and how much of the cache is to be used. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

YOUNG = 3.0
"""Rollouts are expected to hold so many times what they do, before any has ended."""
UNSURE, FEW = 0.25, 3.0
"""They are expected to hold so much more than the mean so far, until so many times those in flight have ended: it has
more of the young ones than there will be."""
SETTLED = 10.0
"""So many times the rollouts in flight have ended when those in flight are of all ages: no trend is expected then."""
TREND_S, AHEAD = 120.0, 1.5
"""What rollouts hold is expected to grow by so many times what it did beside its mean over so long."""
LIFETIMES = 12.0
"""What rollouts hold is averaged over so many of their lifetimes: those of one age come and go in waves."""
SHORTEST_S, LONGEST_S = 60.0, 1800.0
"""Bounds of the time that is averaged over."""
SMOOTHED_S = 30.0
MOST_KV, LEAST_KV = 0.96, 0.76
"""Bounds of the share of the KV cache that running requests should have: the rest is for what grows unevenly."""
HEADROOM, MOST_HEADROOM = 1.0, 1.4
"""What is left free, in what a request holds times the root of how many hold it: without preemptions, and at most."""
MORE, CALM_S = 0.25, 300.0
"""Headroom that a preemption adds, and how long it takes until as much is gone."""
FIRST_HELD, MOST_HELD, LEAST_HELD = 0.95, 1.1, 0.6
"""Share of the KV caches that all rollouts should have, with those at their tools: at first, and its bounds."""
HELD_PER_S = 0.00025
"""How fast that share rises while no prompt is computed anew; it falls at most twice as fast. What is decided takes
effect when rollouts end, minutes later: faster, the share would swing around what fits."""
COOLING_S = 60.0
"""It grows no more often: rollouts that run are not cancelled, so that it takes effect late."""


class Held:
    """The share of an engine's KV cache that a rollout holds: of one replica, learned from all of them.

    Args:
        pool: those of all replicas. Their engines are alike, and so are their rollouts: what few of them hold says
            little where some are many times as long as others.
    """

    def __init__(self, pool: Collection[Held]) -> None:
        self._pool = pool
        self._time = self._requests = self._kv = self._ended = 0.0
        self._before: int | None = None
        self._total = 0
        self._trend = 0.0
        self.now = 0.0
        """What one holds, of late."""

    def add(self, kv: float, running: float, inflight: float, ended: int, seconds: float) -> None:
        """Take what requests hold now.

        Args:
            kv: in use, in engines' caches.
            running: requests.
            inflight: rollouts.
            ended: rollouts that are over since the run's start.
            seconds: since it was told before.
        """
        lifetime = self._time / self._ended if self._ended else LONGEST_S
        kept = math.exp(-seconds / min(max(LIFETIMES * lifetime, SHORTEST_S), LONGEST_S))
        new = ended - self._before if self._before is not None else 0
        self._before = ended
        self._total += new
        self._time = self._time * kept + inflight * seconds
        self._kv = self._kv * kept + kv * seconds
        self._requests = self._requests * kept + running * seconds
        self._ended = self._ended * kept + new
        self.now = _towards(self.now, kv / running, seconds / SMOOTHED_S)
        self._trend = _towards(self._trend, kv / running, seconds / TREND_S)

    @property
    def mean(self) -> float:
        """Return what one held on average, of late."""
        return sum(each._kv for each in self._pool) / sum(each._requests for each in self._pool)

    def settled(self, inflight: float, times: float = SETTLED) -> float:
        """Return how near those in flight are to being of all ages, 0 to 1."""
        return min(1.0, self._total / (times * inflight))

    def seen(self, inflight: float) -> float:
        """Return what one holds, as far as it was seen: of late, until those in flight are of all ages."""
        settled = self.settled(inflight)
        return max(1e-9, self.mean * settled + max(self.mean, self.now) * (1 - settled))

    def expected(self, inflight: float) -> float:
        """Return what one will hold on average, as far as is known."""
        mean = self.mean
        growing = max(mean, self.now + AHEAD * (self.now - self._trend))
        old, settled = self.settled(inflight, 1.0), self.settled(inflight)
        young = max(mean, self.now) * YOUNG
        later = (mean * settled + growing * (1 - settled)) * (1 + UNSURE * (1 - self.settled(inflight, FEW)))
        return max(1e-9, young * (1 - old) + old * later)


class Overcommit:
    """The share of the KV caches that all rollouts should have, with those at their tools: learned from all replicas.

    Some of what is evicted is of rollouts that are over: those that are not may hold a little more than there is.

    Args:
        pool: those of all replicas.
    """

    def __init__(self, pool: Collection[Overcommit]) -> None:
        self._pool = pool
        self._own = FIRST_HELD

    @property
    def share(self) -> float:
        """Return it."""
        return sum(each._own for each in self._pool) / len(self._pool)

    def learn(self, recomputed: float, seconds: float) -> None:
        """Take what happened.

        Args:
            recomputed: prompt tokens computed anew, beside as many as are worth the rollouts that cause them.
            seconds: since it was told before.
        """
        change = HELD_PER_S * seconds * max(-2.0, 1 - recomputed)
        self._own = min(MOST_HELD, max(LEAST_HELD, self._own + change))


class Headroom:
    """The share of a KV cache that requests may hold on average, so that the sum of what each holds seldom is more.

    The sum of n that come, grow and go independently of each other varies by the root of n: what is left free is that
    (as servers are staffed: Halfin and Whitt, 1981), times a factor. A preemption raises it, calm lowers it slowly.
    """

    def __init__(self) -> None:
        self._factor = HEADROOM
        self._cooling_s = 0.0

    @property
    def is_raised(self) -> bool:
        """Tell whether preemptions have left it greater than it is without any."""
        return self._factor > HEADROOM

    def share(self, each: float) -> float:
        """Return the share that requests may hold, each of which holds such a share of an engine's cache."""
        return min(MOST_KV, max(LEAST_KV, 1 - self._factor * math.sqrt(each)))

    def learn(self, preempted: float, seconds: float) -> None:
        """Take what happened.

        Args:
            preempted: whether requests were, 0 to 1: less if that says little.
            seconds: since it was told before.
        """
        self._cooling_s -= seconds
        if preempted and self._cooling_s <= 0:
            self._cooling_s = COOLING_S
            self._factor = min(MOST_HEADROOM, self._factor + MORE * preempted)
        elif not preempted:
            self._factor = max(HEADROOM, self._factor - MORE * seconds / CALM_S)


def _towards(before: float, value: float, time_constants: float) -> float:
    return value + (before - value) * math.exp(-time_constants)
