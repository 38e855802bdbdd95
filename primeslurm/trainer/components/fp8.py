"""Conversion of a model to block-scaled FP8 matrix products."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts

from primeslurm.nn.layers.fp8 import FP8Linear, with_fp8_products
from primeslurm.trainer.base.model_draft import ModelDraft
from primeslurm.wire.weight_transfer.tensor_names import in_fp8


def convert(draft: ModelDraft) -> None:
    """Convert a model to FP8 matrix products if the recipe enables them."""
    if draft.recipe.trainer.fp8:
        adapt(draft.model, draft.adapter, draft.stored_fp8)


def adapt(model: nn.Module, state_dict_adapter: Any, stored: frozenset[str]) -> None:
    """Convert the projections and experts of a model to FP8 products, before FSDP shards it.

    If the model's checkpoint stores weights in FP8 (`stored`), other projections are not converted.
    """
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            experts: Any = type(module)
            module.__class__ = with_fp8_products(experts)
        elif type(module) is Linear:
            names = state_dict_adapter.to_hf({f"{name}.weight": module.weight})
            if any(in_fp8(hf) and (not stored or hf in stored) for hf in names):
                module.__class__ = FP8Linear
