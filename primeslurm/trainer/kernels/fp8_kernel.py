"""The quantiser of block-scaled FP8 in Triton: reads a matrix once and writes it once, in the layout of its product.

A program quantises one tile of 128 x 128. How it reads follows from the source's strides and how it writes from the
result's, so a tile is transposed on its way through shared memory, and no product needs a copy of its operands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# DeepGEMM loads scales of rows with TMA: column by column, each beginning at a multiple of 16 bytes.
_ALIGNMENT = 4


@triton.jit
def _encode(values, TALL: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Data and scales of a tile whose blocks are as wide as it is, and one row or all rows high."""
    amax = tl.max(tl.abs(values), axis=1, keep_dims=True)
    if TALL:
        amax = tl.max(amax, axis=0, keep_dims=True)
    scale = tl.div_rn(tl.maximum(amax, SMALLEST), LARGEST)
    return (values * tl.div_rn(1.0, scale)).to(tl.float8e4nv), scale


@triton.jit
def _quantise_tile(  # type: ignore[no-untyped-def]
    source,
    sources,
    data,
    scales,
    n,
    k,
    source_stack,
    source_row,
    source_column,
    scale_stack,
    scale_row,
    scale_column,
    TALL: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One tile of data [stack, n, k]. If there are `sources`, they say which row of the source is read; -1 is zeros."""
    tile_n, tile_k, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = tile_n * 128 + tl.arange(0, 128), tile_k * 128 + tl.arange(0, 128)
    inside = (rows < n)[:, None] & (columns < k)[None, :]
    if sources is None:
        read, present = rows.to(tl.int64), inside
    else:
        read = tl.load(sources + rows, mask=rows < n, other=-1).to(tl.int64)
        present = inside & (read >= 0)[:, None]
    places = stack * source_stack + read[:, None] * source_row + columns.to(tl.int64)[None, :] * source_column
    values = tl.load(source + places, mask=present, other=0.0).to(tl.float32)
    quantised, scale = _encode(values, TALL, SMALLEST, LARGEST)
    tl.store(data + (stack * n + rows)[:, None] * k + columns[None, :], quantised, mask=inside)
    scale_rows = tile_n + tl.arange(0, 1) if TALL else rows
    height = tl.cdiv(n, 128) if TALL else n
    places = stack * scale_stack + scale_rows.to(tl.int64) * scale_row + tile_k * scale_column
    tl.store(scales + places[:, None], scale, mask=(scale_rows < height)[:, None])


@triton.jit
def _quantise_tile_of_group(  # type: ignore[no-untyped-def]
    source,
    sources,
    owners,
    bounds,
    data,
    scales,
    n,
    source_row,
    source_column,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """128 columns of the source by 128 padded rows, all of one group: a tile of the group's data [n, its rows]."""
    tile_n, tile_row = tl.program_id(0), tl.program_id(1)
    columns, rows = tile_n * 128 + tl.arange(0, 128), tile_row * 128 + tl.arange(0, 128)
    read = tl.load(sources + rows).to(tl.int64)
    inside = (columns < n)[:, None]
    places = read[None, :] * source_row + columns.to(tl.int64)[:, None] * source_column
    values = tl.load(source + places, mask=inside & (read >= 0)[None, :], other=0.0).to(tl.float32)
    quantised, scale = _encode(values, False, SMALLEST, LARGEST)
    group = tl.load(owners + tile_row * 128)
    start, end = tl.load(bounds + group), tl.load(bounds + group + 1)
    # Groups begin and end at tiles; that lets a thread write 16 bytes at a time.
    start, length = tl.multiple_of(start, 128).to(tl.int64), tl.multiple_of(end - start, 128)
    places = start * n + columns.to(tl.int64)[:, None] * length + (rows - start)[None, :]
    tl.store(data + places, quantised, mask=inside)
    tl.store(scales + (tile_row.to(tl.int64) * n + columns)[:, None], scale, mask=inside)


def quantise(
    matrix: torch.Tensor, sources: torch.Tensor | None, tall: bool, smallest: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of a matrix.

    Args:
        matrix: [..., n, k] with any strides, on a GPU.
        sources: [rows] int32, for one matrix: which of its rows is each row of the result; -1 is a row of zeros.
        tall: whether blocks are 128 rows high instead of one. They are 128 columns wide.
        smallest: no block's amax counts as less.
        largest: what the amax of a block becomes.
    """
    *stack, n, k = matrix.shape
    n = n if sources is None else len(sources)
    flat = matrix.flatten(0, -3) if stack else matrix[None]
    data = matrix.new_empty((*stack, n, k), dtype=torch.float8_e4m3fn)
    width = triton.cdiv(k, 128)
    if tall:
        scales = matrix.new_empty((len(flat), triton.cdiv(n, 128), width), dtype=torch.float32)
    else:
        aligned = triton.cdiv(n, _ALIGNMENT) * _ALIGNMENT
        scales = matrix.new_empty((len(flat), width, aligned), dtype=torch.float32).mT[:, :n]
    if data.numel():
        grid = (triton.cdiv(n, 128), width, len(flat))
        strides = (*flat.stride(), *scales.stride())
        _quantise_tile[grid](flat, sources, data, scales, n, k, *strides, tall, smallest, largest, num_warps=8)
    return data, scales.unflatten(0, stack) if stack else scales[0]


def quantise_groups_transposed(
    matrix: torch.Tensor,
    sources: torch.Tensor,
    owners: torch.Tensor,
    bounds: torch.Tensor,
    smallest: float,
    largest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data of each group's [n, padded rows of the group], flat, one group after another; scales [n, blocks of rows].

    Args:
        matrix: [rows, n] on a GPU.
        sources: [padded rows] int32: the row of the matrix in each padded row; -1 is a row of zeros.
        owners: [padded rows] int32: the group of each padded row, at least in the first of every 128.
        bounds: [groups + 1] int32: where groups begin and the last one ends, all multiples of 128.
        smallest: no block's amax counts as less.
        largest: what the amax of a block becomes.
    """
    n, rows = matrix.shape[1], len(sources)
    data = matrix.new_empty(n * rows, dtype=torch.float8_e4m3fn)
    scales = matrix.new_empty((rows // 128, n), dtype=torch.float32)
    if data.numel():
        grid = (triton.cdiv(n, 128), rows // 128)
        _quantise_tile_of_group[grid](
            matrix, sources, owners, bounds, data, scales, n, *matrix.stride(), smallest, largest, num_warps=8
        )
    return data, scales.mT
