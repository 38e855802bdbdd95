"""Limits of a tenant's requests to the deployment's engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable


class TokenBudget:
    """The average rate of sampled tokens. Pure; `clock` is in seconds.

    The length of an answer is known only at its end. So a request may start once all earlier answers are paid for.
    """

    def __init__(self, tokens_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = tokens_per_second, clock
        self._paid_at = clock()

    def spend(self, tokens: int) -> None:
        if self._rate is not None:
            self._paid_at = max(self._paid_at, self._clock()) + tokens / self._rate

    @property
    def wait_s(self) -> float:
        """Return the time until the next request may start [s]."""
        return max(0.0, self._paid_at - self._clock())


class Quota:
    """Makes requests wait while too many are in flight, or while the token budget is spent. None: no limit."""

    def __init__(self, max_inflight: int | None, budget: TokenBudget) -> None:
        self._slots = contextlib.nullcontext() if max_inflight is None else asyncio.Semaphore(max_inflight)
        self._budget = budget

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[TokenBudget]:
        """Wait until a request may start. It occupies a slot until the body ends."""
        async with self._slots:
            while wait_s := self._budget.wait_s:
                await asyncio.sleep(wait_s)
            yield self._budget
