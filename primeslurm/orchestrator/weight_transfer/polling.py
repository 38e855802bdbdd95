"""When to look at which engine, how long to wait for its answer, and whose fault it is if none comes. Clocks go in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LEAST_S = 5.0
"""No answer is waited for less long."""
MOST_S = 60.0
"""Nor longer."""
UNRESPONSIVE_S = 30.0
"""An engine that has taken connections and answered nothing for so long is down."""
POLLS_PER_S = 64.0
"""Upper bound for all engines together: a look costs about a millisecond of this process, whatever their number."""
TICK_S = 0.25
HELD_UP = 0.25
"""Who stood still himself for this share of a wait judges nobody by it."""


class AnswerTime:
    """How long to wait for an engine's answer, by how long it took before.

    As TCP does (RFC 6298): the mean of the answers' times and four of their mean deviations, doubled with every answer
    that does not come.

    Args:
        least_s: lower bound.
        most_s: upper bound.
    """

    def __init__(self, least_s: float = LEAST_S, most_s: float = MOST_S) -> None:
        self._least_s, self._most_s = least_s, max(least_s, most_s)
        self._mean: float | None = None
        self._deviation = 0.0
        self._missed = 0

    @property
    def timeout_s(self) -> float:
        """Return how long to wait for the next one."""
        expected = 0.0 if self._mean is None else self._mean + 4 * self._deviation
        return min(max(expected, self._least_s) * 2.0**self._missed, self._most_s)

    def answered(self, seconds: float) -> None:
        """Take in how long an answer took."""
        self._missed = 0
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += (abs(self._mean - seconds) - self._deviation) / 4
        self._mean += (seconds - self._mean) / 8

    def missed(self) -> None:
        """Take in that none came."""
        self._missed = min(self._missed + 1, 10)


class EventLoopDelay:
    """For how long this process's own event loop has stood still: nobody else is late meanwhile.

    Args:
        on_stall: called with the seconds of a stall once it is over.
        stall_s: shorter ones are not told of.
    """

    def __init__(
        self,
        on_stall: Callable[[float], None] = lambda seconds: None,
        stall_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_stall, self._stall_s, self._clock = on_stall, stall_s, clock
        self._sum = 0.0
        self._due: float | None = None
        """When it has to have its next turn."""

    def seconds(self) -> float:
        """Return all that it has stood still so far, in seconds; grows while it is late for its turn."""
        late = 0.0 if self._due is None else max(0.0, self._clock() - self._due)
        return self._sum + late

    def turn(self) -> None:
        """Note a turn of the loop, which has the next one `TICK_S` later."""
        if self._due is not None and (late := self._clock() - self._due) > 0:
            self._sum += late
            if late >= self._stall_s:
                self._on_stall(late)
        self._due = self._clock() + TICK_S

    async def run(self) -> None:
        """Have turns until cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(TICK_S)


class RateLimiter:
    """Hands out turns at a rate that many takers together do not exceed.

    Args:
        per_s: turns a second.
    """

    def __init__(self, per_s: float = POLLS_PER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap_s, self._clock = 1.0 / per_s, clock
        self._next = 0.0

    def wait_s(self) -> float:
        """Take a turn; return how many seconds it is away."""
        now = self._clock()
        self._next = max(self._next, now) + self._gap_s
        return self._next - self._gap_s - now

    async def turn(self) -> None:
        """Take a turn, and wait for it."""
        if (wait_s := self.wait_s()) > 0:
            await asyncio.sleep(wait_s)
