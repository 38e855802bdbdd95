"""When to poll an engine, how long to wait for its answer, and delays of this process's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MIN_TIMEOUT_S = 5.0
MAX_TIMEOUT_S = 60.0
UNRESPONSIVE_S = 30.0  # an engine that has accepted connections and answered nothing for this long is down
POLLS_PER_S = 64.0  # Maximum rate of polls of all engines together. A poll costs this process about a millisecond.
TICK_S = 0.25
# If this process itself was delayed for more than this fraction of a wait, a missing answer proves nothing.
MAX_DELAY_FRACTION = 0.25


class AnswerTimeout:
    """Timeout of an engine's next answer: twice as long as its last answer took, doubled after each missing answer."""

    def __init__(self, least_s: float = MIN_TIMEOUT_S, most_s: float = MAX_TIMEOUT_S) -> None:
        self._least_s, self._most_s = least_s, max(least_s, most_s)
        self.seconds = least_s  # the current timeout

    def answered(self, seconds: float) -> None:
        self.seconds = min(max(2 * seconds, self._least_s), self._most_s)

    def missed(self) -> None:
        self.seconds = min(2 * self.seconds, self._most_s)


class EventLoopDelay:
    """Measures for how long this process's event loop was delayed. No other process is late during that time.

    `on_stall`: called with the duration of a long delay [s] once it is over.
    """

    def __init__(
        self,
        on_stall: Callable[[float], None] = lambda seconds: None,
        stall_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_stall, self._stall_s, self._clock = on_stall, stall_s, clock
        self._sum = 0.0
        self._due: float | None = None  # time of the next tick

    def seconds(self) -> float:
        """Return the total delay so far [s], including that of a tick that is late now."""
        late = 0.0 if self._due is None else max(0.0, self._clock() - self._due)
        return self._sum + late

    def tick(self) -> None:
        if self._due is not None and (late := self._clock() - self._due) > 0:
            self._sum += late
            if late >= self._stall_s:
                self._on_stall(late)
        self._due = self._clock() + TICK_S

    async def run(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)


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
