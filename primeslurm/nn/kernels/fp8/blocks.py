"""Block-scaled FP8 operands: the quantiser, and rows that are laid out by group for it.

The scheme is that of DeepSeek-V3: e4m3 values with one float32 scale per block. Rows (activations, gradients) have
blocks of 1x128, weights of 128x128. A weight gradient sums over tokens, so a row of its operands is one feature, and a
block 128 tokens of it. Scales are amax / 448, unrounded: powers of two (UE8M0) would cost precision for nothing on
SM90. Values are multiplied by the reciprocal of their scale, as vLLM does where it quantises weights by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from primeslurm.nn.block_sizes import FP8_BLOCK
from primeslurm.nn.kernels import host_value_cache
from primeslurm.nn.kernels.fp8 import placeholder_tensor

BLOCK = FP8_BLOCK
ROWS, BLOCKS = (1, BLOCK), (BLOCK, BLOCK)
LARGEST = torch.finfo(torch.float8_e4m3fn).max
# An all-zero block needs some scale. The usual 1e-4 would round off gradients, which are divided by a batch's tokens.
SMALLEST_AMAX = 1e-30


@dataclass(frozen=True)
class Quantized:
    """A matrix, or a stack of them: contiguous e4m3 data [..., n, k] and float32 scales, one for each block.

    Blocks that reach beyond the matrix are cut off there. Matrices of groups lie one after another in data that are
    flat: see `quantize_groups_transposed`.
    """

    data: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the data stand for."""
        rows, columns = self.data.shape[-2:]
        scales = self.scales.to(dtype).repeat_interleave(self.block[0], -2).repeat_interleave(self.block[1], -1)
        return self.data.to(dtype) * scales[..., :rows, :columns]

    def transposed(self) -> Quantized:
        """The same of the transposed matrix, for square blocks: numbers and scales are those of its quantised form."""
        if self.data.is_cuda:
            return Quantized(_weight_kernel().transpose(self.data), self.scales.mT.contiguous(), self.block)
        return Quantized(self.data.mT.contiguous(), self.scales.mT.contiguous(), self.block)


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group, laid out anew so that every group begins and ends at a multiple of BLOCK."""

    sizes: list[int]
    """Rows of each group with its padding."""
    bounds: torch.Tensor
    """[groups + 1] int32: the padded row at which each group begins, and where the last one ends."""
    places: torch.Tensor
    """[rows] int64: the padded row of each row."""
    sources: torch.Tensor
    """[padded rows] int32: the row in each padded row, -1 for padding."""
    owners: torch.Tensor
    """[padded rows] int32: each padded row's group, -1 for padding."""

    @classmethod
    @functools.lru_cache(maxsize=1)
    def of(cls, offsets: torch.Tensor) -> Groups:
        """Lay out groups by where each ends, [groups] int32. The host has to know that.

        The products of a layer share one tensor of offsets, and only the first of them waits, unless it was noted.
        """
        numbers = host_value_cache.known(offsets)
        ends = offsets.tolist() if numbers is None else numbers
        sizes = [-((start - end) // BLOCK) * BLOCK for start, end in itertools.pairwise([0, *ends])]
        counts = offsets.diff(prepend=offsets.new_zeros(1)).long()
        padded = (counts + BLOCK - 1) // BLOCK * BLOCK
        bounds = F.pad(padded.cumsum(0), (1, 0))
        group = torch.arange(len(sizes), device=offsets.device).repeat_interleave(counts, output_size=ends[-1])
        row = torch.arange(ends[-1], device=offsets.device)
        places = row + (bounds[:-1] - (offsets.long() - counts))[group]
        owners, sources = torch.full((2, sum(sizes)), -1, dtype=torch.int32, device=offsets.device)
        owners[places], sources[places] = group.int(), row.int()
        return cls(sizes, bounds.int(), places, sources, owners)

    def compact(self, result: torch.Tensor) -> torch.Tensor:
        """Leave the padding out of [padded rows, n]: [rows, n]. There is none where the dispatcher filled groups up."""
        return result if len(result) == len(self.places) else result.index_select(0, self.places)

    def padded(self, matrix: torch.Tensor) -> torch.Tensor:
        """Spread [rows, k] to [padded rows, k], with zeros in between."""
        result = matrix.new_zeros(len(self.owners), matrix.shape[1])
        result[self.places] = matrix
        return result

    def ranges(self) -> Iterator[tuple[int, slice]]:
        """Each group's number and padded rows."""
        start = 0
        for group, size in enumerate(self.sizes):
            yield group, slice(start, start + size)
            start += size


def quantize(matrix: torch.Tensor, block: tuple[int, int]) -> Quantized:
    """Quantise a matrix [..., n, k] in ROWS or BLOCKS. A transposed view needs no copy before.

    Of a weight that is there in FP8 already, and its transposed view, that is what is returned.
    """
    if block == BLOCKS and (known := placeholder_tensor.behind(matrix)) is not None:
        return _as_viewed(known, matrix)
    if matrix.is_cuda:
        data, scales = _kernel().quantize(matrix, None, block == BLOCKS, SMALLEST_AMAX, LARGEST)
        return Quantized(data, scales, block)
    rows, columns = matrix.shape[-2:]
    filled = F.pad(matrix.contiguous().float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = filled.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    scales = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=SMALLEST_AMAX) / LARGEST
    data = (blocks * scales.reciprocal()).view_as(filled)[..., :rows, :columns].to(torch.float8_e4m3fn)
    return Quantized(data.contiguous(), scales.squeeze(-1).squeeze(-2), block)


def _as_viewed(known: Quantized, matrix: torch.Tensor) -> Quantized:
    found = known if matrix.stride(-1) == 1 else known.transposed()
    assert found.data.shape == matrix.shape, "a part of a weight that is there in FP8 alone"
    return found


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """Scales of blocks by their amax, float32."""
    # A number would make this a product with its reciprocal, on GPUs, which rounds differently.
    return amax.clamp(min=SMALLEST_AMAX) / amax.new_full((), LARGEST)


def amax_of_blocks(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Amax [..., n / BLOCK, k / BLOCK] of a matrix [..., n, k] of whole blocks once it is rounded to a dtype."""
    if matrix.is_cuda:
        amax: torch.Tensor = _weight_kernel().amax_of_blocks(matrix)
    else:
        amax = matrix.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).abs().amax((-3, -1))
    return amax.to(dtype).float()


def encode_blocks(matrix: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Data of a matrix [..., n, k] of whole blocks, rounded to a dtype, for scales [..., n / BLOCK, k / BLOCK]."""
    if matrix.is_cuda:
        data: torch.Tensor = _weight_kernel().encode_blocks(matrix, scales, dtype)
        return data
    blocks = matrix.to(dtype).float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    values = blocks * scales.reciprocal()[..., :, None, :, None]
    return values.flatten(-4, -3).flatten(-2).to(torch.float8_e4m3fn)


def quantize_groups(matrix: torch.Tensor, groups: Groups) -> Quantized:
    """Quantise a matrix [rows, k] in ROWS, as [padded rows, k]."""
    if matrix.is_cuda:
        data, scales = _kernel().quantize(matrix, groups.sources, False, SMALLEST_AMAX, LARGEST)
        return Quantized(data, scales, ROWS)
    return quantize(groups.padded(matrix), ROWS)


def quantize_groups_transposed(matrix: torch.Tensor, groups: Groups) -> Quantized:
    """Quantise each group of a matrix [rows, n] as [n, padded rows of the group] in ROWS.

    Data are flat, one group after another. Scales are [n, blocks of padded rows].
    """
    if matrix.is_cuda:
        _, _, data, scales = _kernel().quantize_both_ways(matrix, _layout(groups), False, SMALLEST_AMAX, LARGEST)
        return Quantized(data, scales, ROWS)
    whole = quantize(groups.padded(matrix).mT, ROWS)
    parts = [whole.data.view(torch.uint8)[:, part].flatten() for _, part in groups.ranges()]
    return Quantized(torch.cat(parts).view(torch.float8_e4m3fn), whole.scales, ROWS)


def quantize_transposed(matrix: torch.Tensor) -> Quantized:
    """Quantise the transpose [n, rows] of a matrix in ROWS, filled up with zeros to a multiple of BLOCK rows."""
    return quantize(F.pad(matrix, (0, 0, 0, -len(matrix) % BLOCK)).mT, ROWS)


def quantize_both_ways(matrix: torch.Tensor) -> tuple[Quantized, Quantized]:
    """Quantise a matrix [rows, n] in ROWS, and as `quantize_transposed`, by reading it once."""
    if not matrix.is_cuda:
        return quantize(matrix, ROWS), quantize_transposed(matrix)
    data, scales, across, across_scales = _kernel().quantize_both_ways(matrix, None, True, SMALLEST_AMAX, LARGEST)
    return Quantized(data, scales, ROWS), Quantized(across.view(matrix.shape[1], -1), across_scales, ROWS)


def quantize_groups_both_ways(matrix: torch.Tensor, groups: Groups) -> tuple[Quantized, Quantized]:
    """Quantise a matrix [rows, n] as `quantize_groups` and as `quantize_groups_transposed`, by reading it once."""
    if not matrix.is_cuda:
        return quantize_groups(matrix, groups), quantize_groups_transposed(matrix, groups)
    found = _kernel().quantize_both_ways(matrix, _layout(groups), True, SMALLEST_AMAX, LARGEST)
    return Quantized(found[0], found[1], ROWS), Quantized(found[2], found[3], ROWS)


def _layout(groups: Groups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return groups.sources, groups.owners, groups.bounds


def _kernel() -> Any:
    from primeslurm.nn.kernels.fp8 import block_kernel

    return block_kernel


def _weight_kernel() -> Any:
    from primeslurm.nn.kernels.fp8 import weight_kernel

    return weight_kernel
