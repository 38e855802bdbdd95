"""The order in which tasks come, fixed by the seed: the same after a restart, and for every worker."""

from __future__ import annotations

import random
from functools import lru_cache

WINDOW = 2**17
"""Tasks that are shuffled with one another."""
ENDLESS_WINDOW = 1024
"""The same where there is no end of tasks: they are made before the first of them is run."""


def first_epoch(position: int, seed: int, window: int, tasks: int | None = None) -> int:
    """Find the task at a position of the first epoch, which is shuffled window by window.

    Args:
        position: in the epoch.
        seed: of the run.
        window: tasks that are shuffled with one another; the whole taskset, if it has no more.
        tasks: how many there are, where the last window is known to be shorter; None: no end of them is known.

    Returns:
        Its index in the taskset.
    """
    number, offset = divmod(position, window)
    first = number * window
    size = window if tasks is None else min(window, tasks - first)
    return first + _order(f"{seed}/0/{number}", size)[offset]


def later_epoch(epoch: int, offset: int, seed: int, tasks: int) -> int:
    """Find the index of a task in an epoch after the first, which is shuffled as a whole."""
    return _order(f"{seed}/{epoch}", tasks)[offset]


@lru_cache(maxsize=8)
def _order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order
