"""Training in block-scaled FP8: linear layers and experts whose forward pass and both gradients are FP8 products.

Masters stay float32. The copies that FSDP gathers, in the compute dtype, are quantised whenever they are used. Policies
are quantised from the compute dtype, too (`weights.export.Encoding`), so trainer and engines multiply by the same
numbers. Until the first update, an engine that has loaded an FP8 checkpoint has the checkpoint's scales: they differ
from the trainer's by the rounding of the compute dtype. `tensor_names.in_fp8` says which layers compute in FP8. Kernels
take multiples of 128 only; smaller matrices are filled up with zeros, which changes no scale.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear

from primeslurm.nn.kernels.fp8 import ops
from primeslurm.nn.kernels.fp8.backend import backend
from primeslurm.nn.kernels.fp8.blocks import (
    BLOCK,
    BLOCKS,
    ROWS,
    Groups,
    Quantized,
    quantize,
    quantize_both_ways,
    quantize_groups,
    quantize_groups_both_ways,
    quantize_groups_transposed,
    quantize_transposed,
)
from primeslurm.nn.kernels.fp8.quantized_cache import QuantizedCache

# Of what several products share: their input, by rows for themselves and by columns for their weights' gradients.
_rows, _columns, _group_rows, _group_columns = (QuantizedCache[Quantized]() for _ in range(4))


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _times(_rows.of(rows, _quantised), quantize(weight, BLOCKS), rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows = for_weight = None
        by_rows, by_columns = _forms(gradient.flatten(0, -2), *ctx.needs_input_grad)
        if by_rows:
            for_rows = _times(by_rows, quantize(weight.mT, BLOCKS), gradient)
        if by_columns:
            right = _columns.of(rows, lambda t: quantize_transposed(t.flatten(0, -2)))
            for_weight = backend(rows.device.type).outer(by_columns, right).to(weight.dtype)
        return for_rows, for_weight


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups = Groups.of(offsets)
        quantised = _group_rows.of(rows, lambda t: quantize_groups(t, ctx.groups), ctx.groups)
        return _grouped_times(quantised, quantize(weight, BLOCKS), ctx.groups, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows = for_weight = None
        by_rows, by_columns = _group_forms(gradient, ctx.groups, *ctx.needs_input_grad[:2])
        if by_rows:
            for_rows = _grouped_times(by_rows, quantize(weight.mT, BLOCKS), ctx.groups, gradient.dtype)
        if by_columns:
            right = _group_columns.of(rows, lambda t: quantize_groups_transposed(t, ctx.groups), ctx.groups)
            for_weight = backend(rows.device.type).grouped_outer(by_columns, right, ctx.groups).to(weight.dtype)
        return for_rows, for_weight, None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return quantize(weight, BLOCKS).values().to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def linear_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows [..., k] by weight [n, k]: [..., n]."""
    multiply = ops.linear_product if torch.compiler.is_compiling() else _LinearProduct.apply
    product: torch.Tensor = multiply(_filled(rows, -1), _filled(weight, -1, -2))
    return product[..., : len(weight)]


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply each of rows [rows, k] by the weight [groups, n, k] of its group: [rows, n].

    A group ends at its offset.
    """
    multiply = ops.grouped_product if torch.compiler.is_compiling() else _GroupedProduct.apply
    product: torch.Tensor = multiply(_filled(rows, -1), _filled(weight, -1, -2), offsets)
    return product[..., : weight.shape[1]]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What a quantised weight stands for; its gradient is the weight's. For weights that are used without a product."""
    return _Rounded.apply(weight)


def _quantised(rows: torch.Tensor) -> Quantized:
    return quantize(rows.flatten(0, -2), ROWS)


def _forms(gradient: torch.Tensor, rows: bool, columns: bool) -> tuple[Quantized | None, Quantized | None]:
    """A gradient [rows, n] as its products want it: by rows, and by columns."""
    if rows and columns:
        return quantize_both_ways(gradient)
    return quantize(gradient, ROWS) if rows else None, quantize_transposed(gradient) if columns else None


def _group_forms(
    gradient: torch.Tensor, groups: Groups, rows: bool, columns: bool
) -> tuple[Quantized | None, Quantized | None]:
    """The same for the rows of groups."""
    if rows and columns:
        return quantize_groups_both_ways(gradient, groups)
    return (
        quantize_groups(gradient, groups) if rows else None,
        quantize_groups_transposed(gradient, groups) if columns else None,
    )


def _times(quantised: Quantized, weight: Quantized, rows: torch.Tensor) -> torch.Tensor:
    """The product, with leading dimensions and dtype of the rows that were quantised."""
    product = backend(rows.device.type).product(quantised, weight)
    return product.to(rows.dtype).view(*rows.shape[:-1], -1)


def _grouped_times(rows: Quantized, weight: Quantized, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    product = backend(rows.data.device.type).grouped_product(rows, weight, groups)
    return groups.compact(product).to(dtype)


def _filled(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Fill up with zeros at the end of dimensions -1 or -2 up to a multiple of BLOCK."""
    columns, rows = (-tensor.shape[dim] % BLOCK if dim in dims else 0 for dim in (-1, -2))
    return F.pad(tensor, (0, columns, 0, rows)) if columns or rows else tensor


class FP8Linear(Linear):
    """Linear in block-scaled FP8; a bias is added in the compute dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        product = linear_product(input, self.weight)
        return product if self.bias is None else product + self.bias


class FP8Experts:
    """Mixed into a class of grouped experts: their products in block-scaled FP8. Biases are added as they are there."""

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_product(A, B_t.transpose(-2, -1), offs)


@functools.cache
def with_fp8_products(experts: Any) -> Any:
    return type(f"FP8{experts.__name__}", (FP8Experts, experts), {})
