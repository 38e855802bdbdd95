"""FlashMLA's forward pass over selected keys, on Hopper and Blackwell GPUs, from the copy in vLLM."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

# Sizes that the kernels support: rank, rotary part, and numbers of heads
RANK, ROPE, HEADS = 512, 64, (64, 128)
# The number of selected keys has to be a multiple of this
SLOTS = 128


@functools.cache
def _library() -> ModuleType | None:
    try:
        return importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    except ImportError:
        return None


def fits(query: torch.Tensor, where: torch.Tensor, rank: int) -> bool:
    """Return whether the kernels are installed and support queries [queries, heads, rank + rope] with these keys."""
    shape = query.shape[1] in HEADS and rank == RANK and query.shape[2] == RANK + ROPE
    return shape and where.shape[1] % SLOTS == 0 and query.is_cuda and _library() is not None


def forward(
    query: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # FlashMLA's backward pass supports dense attention only, so `sparse_mla_backward` uses these results.
    library = _library()
    assert library is not None
    out, _, normaliser = library.flash_mla_sparse_fwd(
        query.contiguous(), keys.unsqueeze(1).contiguous(), where.unsqueeze(1).contiguous(), scale, RANK
    )
    return out, normaliser.unsqueeze(-1)
