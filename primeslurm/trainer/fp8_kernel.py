"""The quantiser of block-scaled FP8 as one Triton kernel: reads a matrix once, writes it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _quantise_tile(  # type: ignore[no-untyped-def]
    source,
    data,
    scales,
    n,
    k,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One tile of 128 x 128: a block, or 128 of them."""
    tile_n, tile_k, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = tile_n * 128 + tl.arange(0, 128), tile_k * 128 + tl.arange(0, 128)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    places = stack * n * k + rows.to(tl.int64)[:, None] * k + columns[None, :]
    values = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    amax = tl.abs(values)
    if WIDE:
        amax = tl.max(amax, axis=1, keep_dims=True)
    if TALL:
        amax = tl.max(amax, axis=0, keep_dims=True)
    scale = tl.div_rn(tl.maximum(amax, SMALLEST), LARGEST)
    tl.store(data + places, (values * tl.div_rn(1.0, scale)).to(tl.float8e4nv), mask=inside)
    scale_rows = tile_n + tl.arange(0, 1) if TALL else rows
    scale_columns = tile_k + tl.arange(0, 1) if WIDE else columns
    height, width = tl.cdiv(n, 128) if TALL else n, tl.cdiv(k, 128) if WIDE else k
    places = (stack * height + scale_rows)[:, None] * width + scale_columns[None, :]
    tl.store(scales + places, scale, mask=(scale_rows < height)[:, None] & (scale_columns < width)[None, :])


def quantise(
    matrix: torch.Tensor, tall: bool, wide: bool, smallest: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of a matrix [..., n, k] on a GPU.

    Args:
        tall, wide: whether blocks are 128 rows, and 128 columns. At least one is true.
        smallest: no block's amax counts as less.
        largest: what the amax of a block becomes.
    """
    matrix = matrix.contiguous()
    *stack, n, k = matrix.shape
    count = matrix.numel() // max(1, n * k)
    scale_shape = (*stack, triton.cdiv(n, 128) if tall else n, triton.cdiv(k, 128) if wide else k)
    data = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    scales = matrix.new_empty(scale_shape, dtype=torch.float32)
    if matrix.numel():
        grid = (triton.cdiv(n, 128), triton.cdiv(k, 128), count)
        _quantise_tile[grid](matrix, data, scales, n, k, tall, wide, smallest, largest, num_warps=8)
    return data, scales
