"""Host copies of small integer tensors, cached on the tensor object.

The host has to know the number of rows of each expert, and must wait for the GPU to get it. The cache avoids waiting a
second time.
"""

from __future__ import annotations

import itertools

import torch


def store(tensor: torch.Tensor, numbers: list[int]) -> list[int]:
    """Cache the values of an integer tensor, and return them."""
    tensor.numbers_on_host = numbers  # type: ignore[attr-defined]
    return numbers


def get(tensor: torch.Tensor) -> list[int] | None:
    """Return the cached values of this tensor object, or None."""
    return getattr(tensor, "numbers_on_host", None)


def ends(counts: torch.Tensor) -> torch.Tensor:
    """Return the end of each expert's rows (int32) from the row counts. Also converts cached counts to cached ends."""
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    if not torch.compiler.is_compiling() and (numbers := get(counts)) is not None:
        store(offsets, list(itertools.accumulate(numbers)))
    return offsets
