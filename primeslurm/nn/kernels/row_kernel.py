"""Triton kernels for `rows`, with the same shapes: each row is read and written once, and sums stay in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Maximum number of columns per program, limited by registers
MAX_BLOCK = 2048


def spread(rows: torch.Tensor, owner: torch.Tensor, slots: int) -> torch.Tensor:
    out = rows.new_empty(owner.shape[0], rows.shape[1])
    if out.numel():
        block, grid = _tiles(*out.shape)
        _spread_kernel[grid](rows, owner, out, slots, rows.shape[1], BLOCK=block)
    return out


def gathered(rows: torch.Tensor, where: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    (count, slots), dim = where.shape, rows.shape[1]
    out = rows.new_empty(count, dim)
    if out.numel():
        block, grid = _tiles(count, dim)
        _gathered_kernel[grid](
            rows,
            where.contiguous(),
            where if weights is None else weights.contiguous(),
            out,
            dim,
            SLOTS=slots,
            WEIGHTED=weights is not None,
            BLOCK=block,
        )
    return out


def gradients(
    grad: torch.Tensor, rows: torch.Tensor, owner: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of rows [n, dim] and weights [m, slots] from that of `gathered` [m, dim]."""
    of_rows, of_weights = torch.empty_like(rows), torch.zeros_like(weights, memory_format=torch.contiguous_format)
    if rows.numel():
        block = min(MAX_BLOCK, triton.next_power_of_2(rows.shape[1]))
        _gradients_kernel[(rows.shape[0],)](
            grad, rows, owner, weights.contiguous(), of_rows, of_weights, weights.shape[1], rows.shape[1], BLOCK=block
        )
    return of_rows, of_weights


def _tiles(count: int, dim: int) -> tuple[int, tuple[int, int]]:
    block = min(MAX_BLOCK, triton.next_power_of_2(dim))
    return block, (count, triton.cdiv(dim, block))


@triton.jit
def _spread_kernel(rows, owner, out, slots, dim, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(owner + place)
    end = tl.where(slot >= 0, dim, 0)  # read nothing for padding rows
    values = tl.load(rows + (slot // slots) * dim + column, mask=column < end, other=0.0)
    tl.store(out + place * dim + column, values, mask=column < dim)


@triton.jit
def _gathered_kernel(  # type: ignore[no-untyped-def]
    rows, where, weights, out, dim, SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(where + row * SLOTS + slot)
        end = tl.where(place >= 0, dim, 0)  # read nothing for empty slots
        values = tl.load(rows + place * dim + column, mask=column < end, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + row * SLOTS + slot).to(tl.float32)
        total += values
    tl.store(out + row * dim + column, total.to(out.dtype.element_ty), mask=column < dim)


@triton.jit
def _gradients_kernel(  # type: ignore[no-untyped-def]
    grad, rows, owner, weights, of_rows, of_weights, slots, dim, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(owner + place)
    end = tl.where(slot >= 0, dim, 0)
    weight = tl.load(weights + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for start in range(0, dim, BLOCK):
        column = start + tl.arange(0, BLOCK)
        of_sum = tl.load(grad + (slot // slots) * dim + column, mask=column < end, other=0.0).to(tl.float32)
        row = tl.load(rows + place * dim + column, mask=column < end, other=0.0).to(tl.float32)
        product += of_sum * row
        tl.store(of_rows + place * dim + column, (of_sum * weight).to(of_rows.dtype.element_ty), mask=column < dim)
    tl.store(of_weights + slot, tl.sum(product).to(of_weights.dtype.element_ty), mask=slot >= 0)
