"""Linear layers and experts that compute the forward pass and both gradients in block-scaled FP8.

Master weights stay float32. FSDP gathers copies in the compute dtype, which are quantized at each use. Exported
policies are quantized from the compute dtype, too (`trainer.weights.export.Encoding`), so that trainer and engines
multiply by the same numbers. Until the first update, engines that loaded an FP8 checkpoint use its scales.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
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

T = TypeVar("T")


class QuantizedCache(Generic[T]):
    """A cache of one tensor's quantized form, so that projections with the same input quantize it once.

    A call on any cache also drops the results of all caches whose tensors are gone.
    """

    _all: ClassVar[weakref.WeakSet[QuantizedCache[Any]]] = weakref.WeakSet()

    def __init__(self) -> None:
        QuantizedCache._all.add(self)
        self._storage: StorageWeakRef | None = None
        self._key: tuple[Any, ...] = ()
        self._context: object = None
        self._result: T | None = None

    def of(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], T], context: object = None) -> T:
        """Return `make(tensor)`, from the cache if tensor and context are those of the last call.

        `make` is the same in all calls. The result may depend on `context`, which is compared by identity. The tensor
        must not be an inference tensor, because these have no version.
        """
        for other in QuantizedCache._all:
            other._drop_expired()
        # Activation checkpointing passes each consumer a new view, so tensors are identified by storage and view.
        storage = StorageWeakRef(tensor.untyped_storage())
        # The weak reference, which is kept, prevents the address from being reused for another storage.
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if self._result is None or key != self._key or context is not self._context:
            self._result = None  # may be large, so free it first
            self._result = make(tensor)
            self._storage, self._key, self._context = storage, key, context
        return self._result

    def _drop_expired(self) -> None:
        if self._storage is not None and self._storage.expired():
            self._storage, self._key, self._context, self._result = None, (), None, None


# Caches of inputs that several products share: quantized by rows for the products, by columns for weight gradients.
_rows, _columns, _group_rows, _group_columns = (QuantizedCache[Quantized]() for _ in range(4))


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _times(_rows.of(rows, _quantize_rows), quantize(weight, BLOCKS), rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows = for_weight = None
        by_rows, by_columns = _quantize_gradient(gradient.flatten(0, -2), *ctx.needs_input_grad)
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
        by_rows, by_columns = _quantize_group_gradient(gradient, ctx.groups, *ctx.needs_input_grad[:2])
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
    """Multiply rows [..., k] by weight [n, k]. Returns [..., n]."""
    multiply = ops.linear_product if torch.compiler.is_compiling() else _LinearProduct.apply
    product: torch.Tensor = multiply(_padded(rows, -1), _padded(weight, -1, -2))
    return product[..., : len(weight)]


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply rows [rows, k] by their group's weight [groups, n, k]. Returns [rows, n]. Groups end at `offsets`."""
    multiply = ops.grouped_product if torch.compiler.is_compiling() else _GroupedProduct.apply
    product: torch.Tensor = multiply(_padded(rows, -1), _padded(weight, -1, -2), offsets)
    return product[..., : weight.shape[1]]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Round a weight through FP8 and back, with a straight-through gradient. For weights used outside of products."""
    return _Rounded.apply(weight)


def _quantize_rows(rows: torch.Tensor) -> Quantized:
    return quantize(rows.flatten(0, -2), ROWS)


def _quantize_gradient(gradient: torch.Tensor, rows: bool, columns: bool) -> tuple[Quantized | None, Quantized | None]:
    if rows and columns:
        return quantize_both_ways(gradient)
    return quantize(gradient, ROWS) if rows else None, quantize_transposed(gradient) if columns else None


def _quantize_group_gradient(
    gradient: torch.Tensor, groups: Groups, rows: bool, columns: bool
) -> tuple[Quantized | None, Quantized | None]:
    if rows and columns:
        return quantize_groups_both_ways(gradient, groups)
    return (
        quantize_groups(gradient, groups) if rows else None,
        quantize_groups_transposed(gradient, groups) if columns else None,
    )


def _times(quantised: Quantized, weight: Quantized, rows: torch.Tensor) -> torch.Tensor:
    product = backend(rows.device.type).product(quantised, weight)
    return product.to(rows.dtype).view(*rows.shape[:-1], -1)


def _grouped_times(rows: Quantized, weight: Quantized, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    product = backend(rows.data.device.type).grouped_product(rows, weight, groups)
    return groups.compact(product).to(dtype)


def _padded(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    # The kernels need multiples of BLOCK. Padding dimensions -1 or -2 with zeros does not change scales.
    columns, rows = (-tensor.shape[dim] % BLOCK if dim in dims else 0 for dim in (-1, -2))
    return F.pad(tensor, (0, columns, 0, rows)) if columns or rows else tensor


class FP8Linear(Linear):
    """Linear layer in block-scaled FP8. The bias is added in the compute dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = linear_product(input, self.weight)
        return product if self.bias is None else product + self.bias


class FP8Experts:
    """Mixin for a class of grouped experts, which then multiplies in block-scaled FP8."""

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_product(A, B_t.transpose(-2, -1), offs)


@functools.cache
def with_fp8_products(experts: Any) -> Any:
    return type(f"FP8{experts.__name__}", (FP8Experts, experts), {})
