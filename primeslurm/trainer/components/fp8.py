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
    """Have a model compute in FP8, if the recipe says so."""
    if draft.recipe.trainer.fp8:
        adapt(draft.model, draft.adapter, draft.stored_fp8)


def adapt(model: nn.Module, state_dict_adapter: Any, stored: frozenset[str]) -> None:
    """Have a model's projections and experts compute in FP8. Call it before the model is split over ranks.

    Args:
        model: built, on the meta device.
        state_dict_adapter: of the model, to Hugging Face names.
        stored: names of what the model's checkpoint stores in FP8, if it does: no other projection is one of FP8 then.
    """
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            kind: Any = type(module)
            module.__class__ = with_fp8_products(kind)
        elif type(module) is Linear:
            names = state_dict_adapter.to_hf({f"{name}.weight": module.weight})
            if any(in_fp8(hf) and (not stored or hf in stored) for hf in names):
                module.__class__ = FP8Linear
