"""Rule for splitting stacks of experts over ranks. The planner follows it too, so this module imports no torch.

Expert parallelism gives each rank some experts. FSDP then splits the stacks [experts, ...] over the ranks that hold the
same experts: between experts if their number is divisible, otherwise through every expert.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_dimension(size: Sequence[int], ranks: int) -> int | None:
    """Choose the dimension by which a stack of experts is split over `ranks`.

    Args:
        size: of the part that these ranks hold together, [experts, ...].
        ranks: that share it.

    Returns:
        The first dimension that they can share evenly; None if there is none.
    """
    return next((dimension for dimension, length in enumerate(size) if length % ranks == 0), None)


def whole_blocks(size: Sequence[int], dimension: int, ranks: int, block: int) -> bool:
    """Whether shards of a stack of matrices [experts, n, k], split over `ranks`, have whole blocks of block x block."""
    parts = [length // ranks if place == dimension else length for place, length in enumerate(size)]
    return size[dimension] % ranks == 0 and all(length % block == 0 for length in parts[1:])
