"""Retries of operations that may be repeated, based on tenacity.

Components with states of their own (links, the engine pool, file watchers) implement their own retries.
"""

from __future__ import annotations

import random

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    stop_never,
    wait_exponential,
    wait_fixed,
)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0

Errors = type[Exception] | tuple[type[Exception], ...]

_doubled = wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)


def _jittered(state: RetryCallState) -> float:
    """Return a pause of 50 to 150 %, so that clients that failed together do not retry together."""
    return _doubled(state) * random.uniform(0.5, 1.5)


def retry_with_backoff(on: Errors, within_s: float | None = None) -> AsyncRetrying:
    """Retry an awaitable call with growing pauses.

    Call the result: `await retry_with_backoff(OSError)(function, argument)`. Errors other than `on` are raised at once,
    and the last error once the next try would start after `within_s`.
    """
    stop = stop_never if within_s is None else stop_before_delay(within_s)
    return AsyncRetrying(retry=retry_if_exception_type(on), stop=stop, wait=_jittered, reraise=True)


def retry_times(on: Errors, tries: int, pause_s: float) -> AsyncRetrying:
    """Try up to `tries` times with equal pauses, then raise the last error."""
    return AsyncRetrying(
        retry=retry_if_exception_type(on), stop=stop_after_attempt(tries), wait=wait_fixed(pause_s), reraise=True
    )


def retry_in_thread(on: Errors, within_s: float, pause_s: float) -> Retrying:
    """Retry a blocking call with equal pauses, and raise the last error after `within_s`."""
    return Retrying(
        retry=retry_if_exception_type(on), stop=stop_before_delay(within_s), wait=wait_fixed(pause_s), reraise=True
    )
