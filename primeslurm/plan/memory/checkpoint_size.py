"""Size of a checkpoint and of its copies on the train nodes."""

from __future__ import annotations

from pathlib import PurePosixPath

from primeslurm.plan.forecast import Quantity
from primeslurm.recipe import Recipe

# Name of the quantity with the size of these copies
LOCAL_COPIES = "local copies"
_MEMORY = PurePosixPath("/dev/shm")


def checkpoint_bytes(recipe: Recipe, trained: int, state_bytes: int) -> int:
    """Return the bytes of float32 masters and optimizer state.

    Args:
        trained: number of trained parameters.
        state_bytes: bytes of optimizer state per trained parameter.
    """
    return (4 + state_bytes // (2 if recipe.checkpoint.moments == "bfloat16" else 1)) * trained


def local_bytes(recipe: Recipe, saved: int, nodes: int) -> int:
    """Return the bytes of copies on a train node: files of its own ranks, and of another node if there is one."""
    if recipe.checkpoint.local is None:
        return 0
    return saved // nodes * (2 if nodes > 1 else 1)


def in_memory(recipe: Recipe) -> bool:
    return recipe.checkpoint.local is not None and PurePosixPath(recipe.checkpoint.local).is_relative_to(_MEMORY)


def local_amounts(recipe: Recipe, saved: int, nodes: int) -> list[Quantity]:
    size = local_bytes(recipe, saved, nodes)
    if not size:
        return []
    how = f"files of its own ranks{' and of another node' if nodes > 1 else ''} in {recipe.checkpoint.local}"
    return [Quantity(name=LOCAL_COPIES, value=round(size / 1e9, 1), unit="GB per train node", how=how)]
