"""Triton kernels for sharded FP8 weights, one block of 128 x 128 per program: amax, quantization, and transpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _amax(matrix, amax, n, k, stack_stride, row_stride):
    row, column, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = row * 128 + tl.arange(0, 128), column * 128 + tl.arange(0, 128)
    places = stack * stack_stride + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    values = tl.abs(tl.load(matrix + places).to(tl.float32))
    largest = tl.max(tl.max(values, axis=1), axis=0)
    tl.store(amax + (stack * (n // 128) + row) * (k // 128) + column, largest)


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    matrix,
    scales,
    data,
    n,
    k,
    stack_stride,
    row_stride,
    scale_stack,
    scale_row,
    scale_column,
    DTYPE: tl.constexpr,
):
    row, column, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = row * 128 + tl.arange(0, 128), column * 128 + tl.arange(0, 128)
    places = stack * stack_stride + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    values = tl.load(matrix + places).to(DTYPE).to(tl.float32)
    scale = tl.load(scales + stack * scale_stack + row.to(tl.int64) * scale_row + column * scale_column)
    encoded = (values * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(data + (stack * n + rows)[:, None] * k + columns[None, :], encoded)


@triton.jit
def _transpose(source, target, n, k):
    row, column, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = row * 128 + tl.arange(0, 128), column * 128 + tl.arange(0, 128)
    values = tl.load(source + (stack * n + rows)[:, None] * k + columns[None, :])
    tl.store(target + (stack * k + columns)[:, None] * n + rows[None, :], tl.trans(values))


def amax_of_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return the float32 amax [..., n / 128, k / 128] of a matrix [..., n, k] of whole blocks, with contiguous rows."""
    flat, grid = _blocks(matrix)
    amax = matrix.new_empty((*matrix.shape[:-2], *grid[:2]), dtype=torch.float32)
    _amax[grid](flat, amax, *flat.shape[1:], flat.stride(0), flat.stride(1))
    return amax


def encode_blocks(matrix: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize a matrix [..., n, k] of whole blocks and contiguous rows by given scales. Returns the FP8 data.

    `scales` are [..., n / 128, k / 128] float32. Values are rounded to `dtype` first, bfloat16 or float32.
    """
    flat, grid = _blocks(matrix)
    by_stack = scales.flatten(0, -3) if scales.dim() > 2 else scales[None]
    data = matrix.new_empty(matrix.shape, dtype=torch.float8_e4m3fn)
    through = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    strides = flat.stride(0), flat.stride(1), *by_stack.stride()
    _encode[grid](flat, by_stack, data, *flat.shape[1:], *strides, through)
    return data


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Return the transpose [..., k, n] of contiguous one-byte data [..., n, k] of whole blocks."""
    flat, grid = _blocks(data)
    *stack, n, k = data.shape
    result = data.new_empty((*stack, k, n))
    _transpose[grid](flat.view(torch.uint8), result.view(torch.uint8), n, k)
    return result


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    flat = matrix.flatten(0, -3) if matrix.dim() > 2 else matrix[None]
    assert flat.stride(2) == 1 and flat.shape[1] % 128 == flat.shape[2] % 128 == 0
    return flat, (flat.shape[1] // 128, flat.shape[2] // 128, flat.shape[0])
