"""Triton kernels that quantize to block-scaled FP8, reading and writing each matrix once.

A program quantizes one tile of 128 x 128. It reads with the strides of the source and writes in the layout that the
product needs. Tiles are transposed in shared memory, so that no product has to copy its operands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Layout of groups, three int32 tensors: source row of each padded row (-1 for zeros) [padded rows]; group of each
# padded row, valid in at least the first of every 128 [padded rows]; begin of each group and end of the last, all
# multiples of 128 [groups + 1]
Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# DeepGEMM loads the scales of rows with TMA by column. Each column has to start at a multiple of 16 bytes.
_ALIGNMENT = 4


@triton.jit
def _encode(values, TALL: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize a tile whose blocks have its width, and a height of one row or (TALL) all rows. Returns data, scales."""
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
    """Quantize one tile of [stack, n, k]. `sources`, if given, is the source row of each row; -1 is zeros."""
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
def _quantise_tile_both_ways(  # type: ignore[no-untyped-def]
    source,
    sources,
    owners,
    bounds,
    data,
    scales,
    across,
    across_scales,
    rows,
    n,
    source_row,
    source_column,
    scale_column,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Quantize 128 padded rows of one group by 128 columns, as a tile of `data` [rows, n] and one of its transpose.

    Without `data`, only the transpose `across` is written. Without `sources`, all rows are one group, padded with
    zeros.
    """
    tile_row, tile_n = tl.program_id(0), tl.program_id(1)
    row, column = tile_row * 128 + tl.arange(0, 128), tile_n * 128 + tl.arange(0, 128)
    if sources is None:
        read, present = row.to(tl.int64), row < rows
        start, length = tile_row.to(tl.int64) * 0, tl.num_programs(0) * 128
    else:
        read = tl.load(sources + row).to(tl.int64)
        present = read >= 0
        group = tl.load(owners + tile_row * 128)
        start, end = tl.load(bounds + group), tl.load(bounds + group + 1)
        start, length = start.to(tl.int64), end - start
    places = read[:, None] * source_row + column.to(tl.int64)[None, :] * source_column
    values = tl.load(source + places, mask=(column < n)[None, :] & present[:, None], other=0.0)
    if data is not None:
        quantised, scale = _encode(values.to(tl.float32), False, SMALLEST, LARGEST)
        stored = (row < rows)[:, None]
        tl.store(data + row.to(tl.int64)[:, None] * n + column[None, :], quantised, mask=(column < n)[None, :] & stored)
        tl.store(scales + (tile_n.to(tl.int64) * scale_column + row)[:, None], scale, mask=stored)
    quantised, scale = _encode(tl.trans(values).to(tl.float32), False, SMALLEST, LARGEST)
    # Groups begin and end at tile boundaries, so a thread can write 16 bytes at a time.
    start, length = tl.multiple_of(start, 128), tl.multiple_of(length, 128)
    places = start * n + column.to(tl.int64)[:, None] * length + (row - start)[None, :]
    tl.store(across + places, quantised, mask=(column < n)[:, None])
    tl.store(across_scales + (tile_row.to(tl.int64) * n + column)[:, None], scale, mask=(column < n)[:, None])


def quantize(
    matrix: torch.Tensor, sources: torch.Tensor | None, tall: bool, smallest: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix [..., n, k] with any strides, in blocks of 1 x 128, or 128 x 128 if `tall`.

    Returns data and scales. `sources` are the source rows of the result's rows [rows] int32, -1 for zeros, of a single
    matrix. `smallest` limits a block's amax, and `largest` is the FP8 value to which it is scaled.
    """
    *stack, n, k = matrix.shape
    n = n if sources is None else len(sources)
    flat = matrix.flatten(0, -3) if stack else matrix[None]
    data = matrix.new_empty((*stack, n, k), dtype=torch.float8_e4m3fn)
    width = triton.cdiv(k, 128)
    if tall:
        scales = matrix.new_empty((len(flat), triton.cdiv(n, 128), width), dtype=torch.float32)
    else:
        scales = _scales_of_rows(matrix, len(flat), n, k)
    if data.numel():
        grid = (triton.cdiv(n, 128), width, len(flat))
        strides = (*flat.stride(), *scales.stride())
        warps = 4 if tall and flat.stride(2) != 1 else 8  # 0.21 instead of 0.30 ms for GLM-5's experts on an H200
        _quantise_tile[grid](flat, sources, data, scales, n, k, *strides, tall, smallest, largest, num_warps=warps)
    return data, scales.unflatten(0, stack) if stack else scales[0]


def quantize_both_ways(
    matrix: torch.Tensor, layout: Layout | None, by_rows: bool, smallest: float, largest: float
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Quantize a matrix [rows, n] by rows, and the transpose of each group by rows, reading the matrix once.

    Without a `layout`, all rows are one group, and only the transpose is padded. Returns data [padded rows, n] and
    scales by rows (None unless `by_rows`), flat data of the groups' transposes, and their scales [n, row blocks].
    """
    sources, owners, bounds = layout or (None, None, None)
    n = matrix.shape[1]
    rows = len(matrix) if sources is None else len(sources)
    blocks = triton.cdiv(rows, 128)
    data = scales = None
    if by_rows:
        data = matrix.new_empty((rows, n), dtype=torch.float8_e4m3fn)
        scales = _scales_of_rows(matrix, 1, rows, n)[0]
    across = matrix.new_empty(n * blocks * 128, dtype=torch.float8_e4m3fn)
    across_scales = matrix.new_empty((blocks, n), dtype=torch.float32)
    if across.numel():
        grid = (blocks, triton.cdiv(n, 128))
        strides = (*matrix.stride(), 0 if scales is None else scales.stride(1))
        _quantise_tile_both_ways[grid](
            matrix,
            sources,
            owners,
            bounds,
            data,
            scales,
            across,
            across_scales,
            rows,
            n,
            *strides,
            smallest,
            largest,
            num_warps=4,
        )
    return data, scales, across, across_scales.mT


def _scales_of_rows(matrix: torch.Tensor, stack: int, rows: int, columns: int) -> torch.Tensor:
    aligned = triton.cdiv(rows, _ALIGNMENT) * _ALIGNMENT
    return matrix.new_empty((stack, triton.cdiv(columns, 128), aligned), dtype=torch.float32).mT[:, :rows]


@triton.jit
def _amax_of_block(matrix, amax, n, k, stack_stride, row_stride):
    row, column, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = row * 128 + tl.arange(0, 128), column * 128 + tl.arange(0, 128)
    places = stack * stack_stride + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    values = tl.abs(tl.load(matrix + places).to(tl.float32))
    largest = tl.max(tl.max(values, axis=1), axis=0)
    tl.store(amax + (stack * (n // 128) + row) * (k // 128) + column, largest)


@triton.jit
def _encode_block(  # type: ignore[no-untyped-def]
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
def _transpose_block(source, target, n, k):
    row, column, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows, columns = row * 128 + tl.arange(0, 128), column * 128 + tl.arange(0, 128)
    values = tl.load(source + (stack * n + rows)[:, None] * k + columns[None, :])
    tl.store(target + (stack * k + columns)[:, None] * n + rows[None, :], tl.trans(values))


def amax_of_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return the float32 amax [..., n / 128, k / 128] of a matrix [..., n, k] of whole blocks, with contiguous rows."""
    flat, grid = _blocks(matrix)
    amax = matrix.new_empty((*matrix.shape[:-2], *grid[:2]), dtype=torch.float32)
    _amax_of_block[grid](flat, amax, *flat.shape[1:], flat.stride(0), flat.stride(1))
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
    _encode_block[grid](flat, by_stack, data, *flat.shape[1:], *strides, through)
    return data


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Return the transpose [..., k, n] of contiguous one-byte data [..., n, k] of whole blocks."""
    flat, grid = _blocks(data)
    *stack, n, k = data.shape
    result = data.new_empty((*stack, k, n))
    _transpose_block[grid](flat.view(torch.uint8), result.view(torch.uint8), n, k)
    return result


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    flat = matrix.flatten(0, -3) if matrix.dim() > 2 else matrix[None]
    assert flat.stride(2) == 1 and flat.shape[1] % 128 == flat.shape[2] % 128 == 0
    return flat, (flat.shape[1] // 128, flat.shape[2] // 128, flat.shape[0])
