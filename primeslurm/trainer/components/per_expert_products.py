"""Expert products one by one instead of in one grouped call (`trainer.grouped_mm: false`).

A reference for debugging, if the grouped kernels are suspected of wrong results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchtitan.models.common.moe import GroupedExperts

from primeslurm.trainer.base.model_draft import ModelDraft


def convert(draft: ModelDraft) -> None:
    """Replace the grouped products of all experts if the recipe disables them. Needs the built model."""
    if draft.recipe.trainer.grouped_mm:
        return
    for module in draft.model.modules():
        if isinstance(module, GroupedExperts):
            base: Any = type(module)
            module.__class__ = _one_by_one(base)


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
