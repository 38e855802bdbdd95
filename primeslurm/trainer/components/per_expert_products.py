"""Products of experts one after the other instead of in one call, to look at what is wrong with a layer's experts.

Where grouped products are suspected, these are what they should be.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchtitan.models.common.moe import GroupedExperts

from primeslurm.trainer.base.model_draft import ModelDraft


def convert(draft: ModelDraft) -> None:
    """Take grouped products from every layer's experts, if the recipe says so. Call it once the model is built."""
    if draft.recipe.trainer.grouped_products:
        return
    for module in draft.model.modules():
        if isinstance(module, GroupedExperts):
            base: Any = type(module)
            module.__class__ = _one_by_one(base)


@functools.cache
def _one_by_one(base: Any) -> Any:
    """`base`, which is GroupedExperts or derived from it."""

    class OneByOne(base):
        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return one_by_one(A, B_t, offs)

    return OneByOne


def one_by_one(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply each of rows [rows, k], sorted by group, by the matrix [groups, k, n] of its group: [rows, n].

    A group ends at its offset; rows behind the last are nobody's, and give zeros.
    """
    ends = offsets.tolist()
    parts = [
        rows[start:end] @ matrix for start, end, matrix in zip([0, *ends[:-1]], ends, matrices.unbind(), strict=True)
    ]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], matrices.shape[-1])])
