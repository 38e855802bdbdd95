"""Training in block-scaled FP8: linear layers and experts whose forward pass and both gradients are FP8 products.

Masters stay float32; the compute copies that FSDP gathers are quantised whenever they are used, as engines quantise
what is published to them, so trainer and engines multiply the same numbers.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from primeslurm.trainer import compat  # isort: skip  (before torchtitan)
import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear

from primeslurm.recipe import Recipe
from primeslurm.trainer.block_fp8 import BLOCK, BLOCKS, COLUMNS, ROWS, Groups, backend, quantise

log = logging.getLogger(__name__)

# Small and sensitive; engines keep them in full precision too.
_KEPT = re.compile(r"(^|\.)(lm_head|eh_proj|router\.gate|shared_expert_gate|weights_proj|in_proj_a|in_proj_b)$")


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _times(rows, quantise(weight, BLOCKS))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows = for_weight = None
        if ctx.needs_input_grad[0]:
            for_rows = _times(gradient, quantise(weight, BLOCKS).transposed())
        if ctx.needs_input_grad[1]:
            left, right = (quantise(_filled(t.flatten(0, -2)), COLUMNS) for t in (gradient, rows))
            for_weight = backend(rows.device.type).outer(left, right).to(weight.dtype)
        return for_rows, for_weight


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups = Groups.of(offsets)
        return _grouped_times(rows, quantise(weight, BLOCKS), ctx.groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows = for_weight = None
        if ctx.needs_input_grad[0]:
            for_rows = _grouped_times(gradient, quantise(weight, BLOCKS).transposed(), ctx.groups)
        if ctx.needs_input_grad[1]:
            left, right = (quantise(ctx.groups.padded(t), COLUMNS) for t in (gradient, rows))
            for_weight = backend(rows.device.type).grouped_outer(left, right, ctx.groups).to(weight.dtype)
        return for_rows, for_weight, None


def linear_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [..., k] times weight [n, k]: [..., n]; n and k are multiples of BLOCK."""
    return _LinearProduct.apply(rows, weight)


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """rows [rows, k], each times the weight [groups, n, k] of its group: [rows, n]. A group ends at its offset."""
    return _GroupedProduct.apply(rows, weight, offsets)


def _times(rows: torch.Tensor, weight: Any) -> torch.Tensor:
    product = backend(rows.device.type).product(quantise(rows.flatten(0, -2), ROWS), weight)
    return product.to(rows.dtype).view(*rows.shape[:-1], -1)


def _grouped_times(rows: torch.Tensor, weight: Any, groups: Groups) -> torch.Tensor:
    product = backend(rows.device.type).grouped_product(quantise(groups.padded(rows), ROWS), weight, groups)
    return product[groups.places].to(rows.dtype)


def _filled(matrix: torch.Tensor) -> torch.Tensor:
    """With zero rows up to a multiple of BLOCK."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % BLOCK))


class FP8Linear(Linear):
    """Linear in block-scaled FP8; a bias is added in the compute dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        product = linear_product(input, self.weight)
        return product if self.bias is None else product + self.bias


class FP8Experts(compat.Experts):
    """Grouped experts in block-scaled FP8."""

    @dataclass(kw_only=True, slots=True)
    class Config(compat.Experts.Config):
        pass

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_product(A, B_t.transpose(-2, -1), offs)


def convert(model_config: Any, recipe: Recipe) -> None:
    """Swap in FP8 layers where the recipe asks for them and the scheme fits; others are logged by name, once."""
    if not recipe.trainer.fp8:
        return
    unfit: set[str] = set()

    def fits(name: str, *sizes: int) -> bool:
        if _KEPT.search(name):
            return False
        if any(size % BLOCK for size in sizes):
            unfit.add(re.sub(r"\.\d+\.", ".*.", name))
            return False
        return True

    compat.swap(model_config, Linear, FP8Linear, lambda name, c: fits(name, c.in_features, c.out_features))
    compat.swap(model_config, compat.Experts, FP8Experts, lambda name, c: fits(name, c.dim, c.hidden_dim))
    if unfit:
        log.warning("not in FP8, because a size is no multiple of %d: %s", BLOCK, ", ".join(sorted(unfit)))
