"""Host copies of small integer tensors, cached on the tensor object, so that the host waits for the GPU only once."""

from __future__ import annotations

import itertools

import torch


def store(tensor: torch.Tensor, numbers: list[int]) -> list[int]:
    tensor.numbers_on_host = numbers  # type: ignore[attr-defined]
    return numbers


def get(tensor: torch.Tensor) -> list[int] | None:
    return getattr(tensor, "numbers_on_host", None)


def ends(counts: torch.Tensor) -> torch.Tensor:
    """Return the end of each expert's rows (int32) from the row counts. Also converts cached counts to cached ends."""
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    if not torch.compiler.is_compiling() and (numbers := get(counts)) is not None:
        store(offsets, list(itertools.accumulate(numbers)))
    return offsets
