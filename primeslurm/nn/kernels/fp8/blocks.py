"""Quantization to block-scaled FP8, and the padded layout of rows sorted by group.

The scheme is that of DeepSeek-V3: e4m3 values with one float32 scale per block. Rows (activations and gradients) have
blocks of 1 x 128, weights of 128 x 128. A weight gradient is a sum over tokens, so its operands are transposed: a row
is one feature, and a block has 128 of its tokens.
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
# Scale of an all-zero block. The usual 1e-4 would flush gradients to zero, because they are divided by the batch's
# tokens.
SMALLEST_AMAX = 1e-30


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix or stack: contiguous e4m3 data [..., n, k], and one float32 scale per block.

    Blocks at the edge may be smaller. The data of `quantize_groups_transposed` are flat.
    """

    data: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        rows, columns = self.data.shape[-2:]
        scales = self.scales.to(dtype).repeat_interleave(self.block[0], -2).repeat_interleave(self.block[1], -1)
        return self.data.to(dtype) * scales[..., :rows, :columns]

    def transposed(self) -> Quantized:
        """Return the quantized transpose, for square blocks. It equals the quantization of the transposed matrix."""
        if self.data.is_cuda:
            return Quantized(_kernel().transpose(self.data), self.scales.mT.contiguous(), self.block)
        return Quantized(self.data.mT.contiguous(), self.scales.mT.contiguous(), self.block)


@dataclass(frozen=True)
class Groups:
    """A layout of rows sorted by group, padded so that every group begins and ends at a multiple of BLOCK."""

    sizes: list[int]  # number of rows of each group, including padding
    bounds: torch.Tensor  # begin of each group and end of the last one, in padded rows [groups + 1] int32
    places: torch.Tensor  # padded row of each row [rows] int64
    sources: torch.Tensor  # source row of each padded row [padded rows] int32, -1 for padding
    owners: torch.Tensor  # group of each padded row [padded rows] int32, -1 for padding

    @classmethod
    @functools.lru_cache(maxsize=1)
    def of(cls, offsets: torch.Tensor) -> Groups:
        """Return the layout of groups with the end offsets [groups] int32."""
        # The host needs the offsets. All products of a layer share the tensor, so with the lru_cache only the first one
        # waits for the GPU, and none if the dispatcher has cached the values.
        numbers = host_value_cache.get(offsets)
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
        """Remove the padding of [padded rows, n]. A dispatcher that pads groups itself leaves none to remove."""
        return result if len(result) == len(self.places) else result.index_select(0, self.places)

    def padded(self, matrix: torch.Tensor) -> torch.Tensor:
        result = matrix.new_zeros(len(self.owners), matrix.shape[1])
        result[self.places] = matrix
        return result

    def ranges(self) -> Iterator[tuple[int, slice]]:
        """Yield the number and the padded rows of each group."""
        start = 0
        for group, size in enumerate(self.sizes):
            yield group, slice(start, start + size)
            start += size


def quantize(matrix: torch.Tensor, block: tuple[int, int]) -> Quantized:
    """Quantize a matrix [..., n, k], or a transposed view of one, in ROWS or BLOCKS."""
    # The placeholder of a quantized weight stands for the weight itself.
    if block == BLOCKS and (quantized := placeholder_tensor.lookup(matrix)) is not None:
        return _as_viewed(quantized, matrix)
    if matrix.is_cuda:
        data, scales = _kernel().quantize(matrix, None, block == BLOCKS, SMALLEST_AMAX, LARGEST)
        return Quantized(data, scales, block)
    rows, columns = matrix.shape[-2:]
    filled = F.pad(matrix.contiguous().float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = filled.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    # Scales are not rounded to powers of two (UE8M0), which would lose precision without any gain on SM90. Values are
    # multiplied by the reciprocal of their scale, as vLLM does when it quantizes weights.
    scales = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=SMALLEST_AMAX) / LARGEST
    data = (blocks * scales.reciprocal()).view_as(filled)[..., :rows, :columns].to(torch.float8_e4m3fn)
    return Quantized(data.contiguous(), scales.squeeze(-1).squeeze(-2), block)


def _as_viewed(quantized: Quantized, matrix: torch.Tensor) -> Quantized:
    viewed = quantized if matrix.stride(-1) == 1 else quantized.transposed()
    assert viewed.data.shape == matrix.shape, "a slice of a placeholder tensor cannot be quantized"
    return viewed


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    # Division by a Python number would become a product with its reciprocal on GPUs, which rounds differently.
    return amax.clamp(min=SMALLEST_AMAX) / amax.new_full((), LARGEST)


def amax_of_blocks(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the amax [..., n / BLOCK, k / BLOCK] of a matrix [..., n, k] of whole blocks, rounded to a dtype."""
    if matrix.is_cuda:
        amax: torch.Tensor = _kernel().amax_of_blocks(matrix)
    else:
        amax = matrix.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).abs().amax((-3, -1))
    return amax.to(dtype).float()


def encode_blocks(matrix: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the FP8 data of a matrix [..., n, k], rounded to a dtype, for scales [..., n / BLOCK, k / BLOCK]."""
    if matrix.is_cuda:
        data: torch.Tensor = _kernel().encode_blocks(matrix, scales, dtype)
        return data
    blocks = matrix.to(dtype).float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    values = blocks * scales.reciprocal()[..., :, None, :, None]
    return values.flatten(-4, -3).flatten(-2).to(torch.float8_e4m3fn)


def quantize_groups(matrix: torch.Tensor, groups: Groups) -> Quantized:
    """Quantize a matrix [rows, k] in ROWS, as [padded rows, k]."""
    if matrix.is_cuda:
        data, scales = _kernel().quantize(matrix, groups.sources, False, SMALLEST_AMAX, LARGEST)
        return Quantized(data, scales, ROWS)
    return quantize(groups.padded(matrix), ROWS)


def quantize_groups_transposed(matrix: torch.Tensor, groups: Groups) -> Quantized:
    """Quantize the transpose [n, padded rows of the group] of each group of a matrix [rows, n] in ROWS.

    The data are flat, one group after another. The scales are [n, blocks of padded rows].
    """
    if matrix.is_cuda:
        _, _, data, scales = _kernel().quantize_both_ways(matrix, _layout(groups), False, SMALLEST_AMAX, LARGEST)
        return Quantized(data, scales, ROWS)
    whole = quantize(groups.padded(matrix).mT, ROWS)
    parts = [whole.data.view(torch.uint8)[:, part].flatten() for _, part in groups.ranges()]
    return Quantized(torch.cat(parts).view(torch.float8_e4m3fn), whole.scales, ROWS)


def quantize_transposed(matrix: torch.Tensor) -> Quantized:
    """Quantize the transpose [n, rows] of a matrix in ROWS, padded with zeros to a multiple of BLOCK rows."""
    return quantize(F.pad(matrix, (0, 0, 0, -len(matrix) % BLOCK)).mT, ROWS)


def quantize_both_ways(matrix: torch.Tensor) -> tuple[Quantized, Quantized]:
    """Quantize a matrix [rows, n] in ROWS and as `quantize_transposed`, reading it once."""
    if not matrix.is_cuda:
        return quantize(matrix, ROWS), quantize_transposed(matrix)
    data, scales, across, across_scales = _kernel().quantize_both_ways(matrix, None, True, SMALLEST_AMAX, LARGEST)
    return Quantized(data, scales, ROWS), Quantized(across.view(matrix.shape[1], -1), across_scales, ROWS)


def quantize_groups_both_ways(matrix: torch.Tensor, groups: Groups) -> tuple[Quantized, Quantized]:
    """Quantize a matrix [rows, n] as `quantize_groups` and `quantize_groups_transposed`, reading it once."""
    if not matrix.is_cuda:
        return quantize_groups(matrix, groups), quantize_groups_transposed(matrix, groups)
    results = _kernel().quantize_both_ways(matrix, _layout(groups), True, SMALLEST_AMAX, LARGEST)
    return Quantized(results[0], results[1], ROWS), Quantized(results[2], results[3], ROWS)


def _layout(groups: Groups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return groups.sources, groups.owners, groups.bounds


def _kernel() -> Any:
    from primeslurm.nn.kernels.fp8 import block_kernel

    return block_kernel
