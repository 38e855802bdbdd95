"""Retries of operations that may be repeated.

Components with states of their own (links, the engine pool, file watchers) implement their own retries.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import (
    AsyncRetrying,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_fixed,
)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0

Errors = type[Exception] | tuple[type[Exception], ...]


def retry_with_backoff(
    on: Errors, within_s: float = math.inf, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> Callable[..., Awaitable[Any]]:
    """Retry an awaitable call with growing pauses.

    Call the result: `await retry_with_backoff(OSError)(function, argument)`. Errors other than `on` are raised at once,
    and the last error once the next try would start after `within_s`.
    """

    # Without tenacity, whose bookkeeping of a call takes 0.1 ms: workers call engines hundreds of times a second.
    async def call(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        deadline = time.monotonic() + within_s
        doubled_s = FIRST_PAUSE_S
        while True:
            try:
                return await function(*arguments)
            except on:
                # Pauses differ by 50 to 150 %, so that clients that failed together do not retry together.
                pause_s = doubled_s * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s >= deadline:
                    raise
            doubled_s = min(2 * doubled_s, LONGEST_PAUSE_S)
            await sleep(pause_s)

    return call


def retry_times(on: Errors, tries: int, pause_s: float) -> AsyncRetrying:
    """Return a tenacity loop that makes up to `tries` attempts with equal pauses, then raises the last error."""
    return AsyncRetrying(
        retry=retry_if_exception_type(on), stop=stop_after_attempt(tries), wait=wait_fixed(pause_s), reraise=True
    )


def retry_in_thread(on: Errors, within_s: float, pause_s: float) -> Retrying:
    """Return a tenacity loop for blocking calls: equal pauses, and the last error is raised after `within_s`."""
    return Retrying(
        retry=retry_if_exception_type(on), stop=stop_before_delay(within_s), wait=wait_fixed(pause_s), reraise=True
    )
