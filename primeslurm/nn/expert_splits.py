"""Rule for splitting stacks of experts over ranks. The planner follows it too, so this module imports no torch.

Expert parallelism gives each rank some experts. FSDP then splits the stacks [experts, ...] over the ranks that hold the
same experts: between experts if their number is divisible, otherwise through every expert.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_dimension(size: Sequence[int], ranks: int) -> int | None:
    """Return the first dimension of a stack [experts, ...] that `ranks` can share evenly, or None."""
    return next((dimension for dimension, length in enumerate(size) if length % ranks == 0), None)


def whole_blocks(size: Sequence[int], dimension: int, ranks: int, block: int) -> bool:
    """Return whether each shard of a stack [experts, n, k] consists of whole blocks of block x block weights."""
    shard = [length // ranks if index == dimension else length for index, length in enumerate(size)]
    return size[dimension] % ranks == 0 and all(length % block == 0 for length in shard[1:])
