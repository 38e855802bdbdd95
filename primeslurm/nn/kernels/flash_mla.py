"""FlashMLA's forward pass over selected keys, on Hopper and Blackwell GPUs, from the copy inside vLLM.

Its backward pass is for dense attention only; ours (`sparse_mla_backward`) goes on from what this returns.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

RANK, ROPE, HEADS = 512, 64, (64, 128)
"""What its kernels are built for."""
SLOTS = 128
"""Selected keys come in multiples of this."""


@functools.cache
def _library() -> ModuleType | None:
    try:
        return importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    except ImportError:
        return None


def fits(query: torch.Tensor, where: torch.Tensor, rank: int) -> bool:
    """Whether its kernels take queries [queries, heads, rank + rope] with these keys selected, and are installed."""
    shape = query.shape[1] in HEADS and rank == RANK and query.shape[2] == RANK + ROPE
    return shape and where.shape[1] % SLOTS == 0 and query.is_cuda and _library() is not None


def forward(
    query: torch.Tensor, keys: torch.Tensor, where: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [queries, heads, rank] and the log of the softmax's denominators [queries, heads, 1] in float32."""
    library = _library()
    assert library is not None
    out, _, normaliser = library.flash_mla_sparse_fwd(
        query.contiguous(), keys.unsqueeze(1).contiguous(), where.unsqueeze(1).contiguous(), scale, RANK
    )
    return out, normaliser.unsqueeze(-1)
