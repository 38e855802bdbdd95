"""When to poll an engine, and how long to wait for its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MIN_TIMEOUT_S = 5.0
MAX_TIMEOUT_S = 60.0
UNRESPONSIVE_S = 30.0  # an engine that has accepted connections and answered nothing for this long is down
POLLS_PER_S = 64.0  # Maximum rate of polls of all engines together. A poll costs this process about a millisecond.


class AnswerTimeout:
    """Timeout of an engine's next answer: twice as long as its last answer took, doubled after each missing answer."""

    def __init__(self, least_s: float = MIN_TIMEOUT_S, most_s: float = MAX_TIMEOUT_S) -> None:
        self._least_s, self._most_s = least_s, max(least_s, most_s)
        self.seconds = least_s  # the current timeout

    def answered(self, seconds: float) -> None:
        self.seconds = min(max(2 * seconds, self._least_s), self._most_s)

    def missed(self) -> None:
        self.seconds = min(2 * self.seconds, self._most_s)


class RateLimiter:
    """Limits the rate of operations of many tasks together."""

    def __init__(self, per_s: float = POLLS_PER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = 1.0 / per_s, clock
        self._next = 0.0

    def wait_s(self) -> float:
        """Reserve the next slot, and return how many seconds away it is."""
        now = self._clock()
        self._next = max(self._next, now) + self._interval_s
        return self._next - self._interval_s - now

    async def turn(self) -> None:
        if (wait_s := self.wait_s()) > 0:
            await asyncio.sleep(wait_s)
