"""FlashMLA's forward pass over selected keys, on Hopper and Blackwell GPUs, from the copy in vLLM.

FlashMLA's backward pass supports dense attention only. `sparse_mla_backward` computes the gradients from these results.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

RANK, ROPE, HEADS = 512, 64, (64, 128)
"""Sizes that the kernels support: rank, rotary part, and numbers of heads."""
SLOTS = 128
"""The number of selected keys has to be a multiple of this."""


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
    """Return outputs [queries, heads, rank] and the log-sum-exp of the scores [queries, heads, 1] in float32."""
    library = _library()
    assert library is not None
    out, _, normaliser = library.flash_mla_sparse_fwd(
        query.contiguous(), keys.unsqueeze(1).contiguous(), where.unsqueeze(1).contiguous(), scale, RANK
    )
    return out, normaliser.unsqueeze(-1)
