"""Replace the matrix products of linear layers and experts: block-scaled FP8, or one product per expert."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts

from primeslurm.nn.layers.fp8 import FP8Linear, with_fp8_products
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.wire.weight_transfer.tensor_names import in_fp8


def convert(draft: ModelDraft) -> None:
    """Replace the matrix products of a built model if the recipe asks for FP8 or for one product per expert."""
    trainer = draft.recipe.trainer
    # A reference for debugging, if the grouped kernels are suspected of wrong results.
    for module in () if trainer.grouped_mm else draft.model.modules():
        if isinstance(module, GroupedExperts):
            base: Any = type(module)
            module.__class__ = _one_by_one(base)
    if trainer.fp8:
        adapt(draft.model, draft.adapter, draft.stored_fp8)


def adapt(model: nn.Module, state_dict_adapter: Any, stored: frozenset[str]) -> None:
    """Make the projections and experts of a model multiply in FP8. Call it before FSDP shards the model.

    If the checkpoint stores weights in FP8 (names in `stored`), only those projections change, and all experts.
    """
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            experts: Any = type(module)
            module.__class__ = with_fp8_products(experts)
        elif type(module) is Linear:
            names = state_dict_adapter.to_hf({f"{name}.weight": module.weight})
            if any(in_fp8(hf) and (not stored or hf in stored) for hf in names):
                module.__class__ = FP8Linear


@functools.cache
def _one_by_one(base: Any) -> Any:
    class OneByOne(base):
        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return one_by_one(A, B_t, offs)

    return OneByOne


def one_by_one(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply rows [rows, k], sorted by group, by their group's matrix [groups, k, n]. Returns [rows, n].

    Each group ends at its offset. Rows after the last group result in zeros.
    """
    ends = offsets.tolist()
    products = [
        rows[start:end] @ matrix for start, end, matrix in zip([0, *ends[:-1]], ends, matrices.unbind(), strict=True)
    ]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], matrices.shape[-1])])
