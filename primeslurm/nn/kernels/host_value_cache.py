"""Numbers of small tensors that the host knows, too: noted beside them by who brought them there.

The host has to know how many rows each expert has, and waits for the GPU to hear it. Once it has
heard, nobody waits again.
"""

from __future__ import annotations

import itertools

import torch


def note(tensor: torch.Tensor, numbers: list[int]) -> list[int]:
    """Note what a tensor of integers holds. Returns it."""
    tensor.numbers_on_host = numbers  # type: ignore[attr-defined]
    return numbers


def known(tensor: torch.Tensor) -> list[int] | None:
    """Return what was noted beside this tensor object; None if nothing was."""
    return getattr(tensor, "numbers_on_host", None)


def ends(counts: torch.Tensor) -> torch.Tensor:
    """Where each expert's rows end, int32, by how many each has. What is known of one is known of the other."""
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    if not torch.compiler.is_compiling() and (numbers := known(counts)) is not None:
        note(offsets, list(itertools.accumulate(numbers)))
    return offsets
