"""Trying again what fails for a while, over tenacity: what is asked again, for how long, and with which pauses.

For requests that change nothing when they are repeated. What has states of its own (links, the engine pool, polls of
files) keeps its own time.
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


def _spread(state: RetryCallState) -> float:
    """Each pause is twice the one before, give or take half: who failed together does not come back together."""
    return _doubled(state) * random.uniform(0.5, 1.5)


def retry_with_backoff(on: Errors, within_s: float | None = None) -> AsyncRetrying:
    """Await something until it succeeds, with growing pauses.

    As in `await insisting(OSError)(function, argument)`.

    Args:
        on: errors that pass; any other is raised at once.
        within_s: the last error is raised where the next try would come later than this; None: it never is.
    """
    stop = stop_never if within_s is None else stop_before_delay(within_s)
    return AsyncRetrying(retry=retry_if_exception_type(on), stop=stop, wait=_spread, reraise=True)


def retry_times(on: Errors, tries: int, pause_s: float) -> AsyncRetrying:
    """Await something up to `tries` times; the last error is raised."""
    return AsyncRetrying(
        retry=retry_if_exception_type(on), stop=stop_after_attempt(tries), wait=wait_fixed(pause_s), reraise=True
    )


def retry_in_thread(on: Errors, within_s: float, pause_s: float) -> Retrying:
    """Call something until it succeeds, with equal pauses; the last error is raised after `within_s`."""
    return Retrying(
        retry=retry_if_exception_type(on), stop=stop_before_delay(within_s), wait=wait_fixed(pause_s), reraise=True
    )
