"""FP8 products of compiled layers, as custom operators that torch.compile does not trace.

Eager layers cache quantized inputs by tensor identity. Compiled code cannot, because it reuses the memory of dead
tensors without a new version. So each operator quantizes its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from primeslurm.nn.kernels.fp8.backend import backend
from primeslurm.nn.kernels.fp8.blocks import (
    BLOCK,
    BLOCKS,
    ROWS,
    Groups,
    quantize,
    quantize_groups,
    quantize_groups_transposed,
    quantize_transposed,
)

_Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def linear_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows [..., k] by weight [n, k] in FP8. k and n are multiples of BLOCK. Returns [..., n]."""
    result: torch.Tensor = _linear(rows.flatten(0, -2), weight)
    return result.view(*rows.shape[:-1], -1)


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply rows [rows, k] by their group's weight [groups, n, k] in FP8. k and n are multiples of BLOCK."""
    result: torch.Tensor = _grouped(rows, weight, *_layout(offsets, rows.shape[0]))
    return result


@torch.library.custom_op("primeslurm::fp8_linear", mutates_args=())
def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = backend(rows.device.type).product(quantize(rows, ROWS), quantize(weight, BLOCKS))
    return product.to(rows.dtype).contiguous()


@_linear.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@torch.library.custom_op("primeslurm::fp8_outer", mutates_args=())
def _outer(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Multiply gradient [rows, n] and rows [rows, k], summed over rows. Returns [n, k]."""
    left, right = quantize_transposed(gradient), quantize_transposed(rows)
    return backend(rows.device.type).outer(left, right).to(rows.dtype).contiguous()


@_outer.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(gradient.shape[1], rows.shape[1])


@torch.library.custom_op("primeslurm::fp8_groups", mutates_args=())
def _layout(offsets: torch.Tensor, rows: int) -> _Layout:
    """Return the fields of `Groups`: sizes in host memory, and sources and owners padded to a fixed length."""
    # It waits for the device, so it is an operator of its own: torch.compile merges equal calls. The padded lengths do
    # not depend on the routing of tokens, so that compiled code knows all shapes.
    groups = Groups.of.__wrapped__(Groups, offsets)
    filling = (0, _max_padded_rows(rows, len(offsets)) - len(groups.owners))
    return (
        torch.tensor(groups.sizes, device="cpu"),
        groups.bounds.clone(),
        groups.places,
        F.pad(groups.sources, filling, value=-1).clone(),
        F.pad(groups.owners, filling, value=-1).clone(),
    )


@_layout.register_fake
def _(offsets: torch.Tensor, rows: int) -> _Layout:
    count = offsets.shape[0]
    return (
        torch.empty(count, dtype=torch.int64, device="cpu"),
        offsets.new_empty(count + 1, dtype=torch.int32),
        offsets.new_empty(rows, dtype=torch.int64),
        offsets.new_empty(_max_padded_rows(rows, count), dtype=torch.int32),
        offsets.new_empty(_max_padded_rows(rows, count), dtype=torch.int32),
    )


def _max_padded_rows(rows: int, groups: int) -> int:
    return (rows // BLOCK + groups) * BLOCK


def _groups(
    sizes: torch.Tensor, bounds: torch.Tensor, places: torch.Tensor, sources: torch.Tensor, owners: torch.Tensor
) -> Groups:
    counts = sizes.tolist()
    return Groups(counts, bounds, places, sources[: sum(counts)], owners[: sum(counts)])


@torch.library.custom_op("primeslurm::fp8_grouped", mutates_args=())
def _grouped(
    rows: torch.Tensor,
    weight: torch.Tensor,
    sizes: torch.Tensor,
    bounds: torch.Tensor,
    places: torch.Tensor,
    sources: torch.Tensor,
    owners: torch.Tensor,
) -> torch.Tensor:
    groups = _groups(sizes, bounds, places, sources, owners)
    product = backend(rows.device.type).grouped_product(quantize_groups(rows, groups), quantize(weight, BLOCKS), groups)
    return groups.compact(product).to(rows.dtype).contiguous()


@_grouped.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("primeslurm::fp8_grouped_outer", mutates_args=())
def _grouped_outer(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    sizes: torch.Tensor,
    bounds: torch.Tensor,
    places: torch.Tensor,
    sources: torch.Tensor,
    owners: torch.Tensor,
) -> torch.Tensor:
    """Multiply gradient [rows, n] and rows [rows, k], summed over each group's rows. Returns [groups, n, k]."""
    groups = _groups(sizes, bounds, places, sources, owners)
    left, right = (quantize_groups_transposed(tensor, groups) for tensor in (gradient, rows))
    return backend(rows.device.type).grouped_outer(left, right, groups).to(rows.dtype).contiguous()


@_grouped_outer.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(sizes.shape[0], gradient.shape[1], rows.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    return (
        _linear(gradient, weight.mT) if ctx.needs_input_grad[0] else None,
        _outer(gradient, rows) if ctx.needs_input_grad[1] else None,
    )


def _grouped_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weight, *layout = ctx.saved_tensors
    return (
        _grouped(gradient, weight.mT, *layout) if ctx.needs_input_grad[0] else None,
        _grouped_outer(gradient, rows, *layout) if ctx.needs_input_grad[1] else None,
        *(None for _ in layout),
    )


_linear.register_autograd(_linear_backward, setup_context=_keep)
_grouped.register_autograd(_grouped_backward, setup_context=_keep)
