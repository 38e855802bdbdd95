"""The order of tasks in an environment: shuffled by the seed, and the same for every worker and after a restart."""

from __future__ import annotations

import random
from functools import lru_cache

WINDOW = 2**17  # Number of tasks that are shuffled together
# The same for an endless taskset. It is smaller, because the whole window is generated before the first task runs.
ENDLESS_WINDOW = 1024


def first_epoch(position: int, seed: int, window: int, tasks: int | None = None) -> int:
    """Return the index of the task at a position of the first epoch. `tasks`: size of the taskset, if it is known."""
    # Each window of tasks is shuffled by itself. The last window of a taskset may be shorter.
    number, offset = divmod(position, window)
    first = number * window
    size = window if tasks is None else min(window, tasks - first)
    return first + _order(f"{seed}/0/{number}", size)[offset]


def later_epoch(epoch: int, offset: int, seed: int, tasks: int) -> int:
    """Return the index of a task in an epoch after the first, which is shuffled as a whole."""
    return _order(f"{seed}/{epoch}", tasks)[offset]


@lru_cache(maxsize=8)
def _order(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order
