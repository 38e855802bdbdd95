"""Matrix products of block-scaled FP8 operands: the backend interface, an emulation, and the choice by device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import torch

from primeslurm.nn.kernels.fp8.blocks import BLOCK, ROWS, Groups, Quantized
from primeslurm.nn.kernels.fp8.deep_gemm import DeepGemm


class Backend(Protocol):
    """Products of quantized operands, accumulated in float32. Padding rows of results are undefined."""

    def product(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """Multiply a [m, k], scaled per row (ROWS), by b [n, k], scaled per block (BLOCKS). Returns [m, n]."""

    def grouped_product(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        """Multiply rows a [padded rows, k] in ROWS by their group's b [groups, n, k] in BLOCKS."""

    def outer(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """Multiply a [n, rows] by b [k, rows], both in ROWS. Returns [n, k] in float32."""

    def grouped_outer(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        """Compute `outer` for each group of `quantize_groups_transposed`. Returns [groups, n, k]."""


class Emulated:
    """The backend in float32, for machines without FP8. Equal to the kernels up to the order of summation."""

    def product(self, a: Quantized, b: Quantized) -> torch.Tensor:
        return a.values() @ b.values().mT

    def grouped_product(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        rows, weights = a.values(), b.values()
        return torch.cat([rows[part] @ weights[group].mT for group, part in groups.ranges()])

    def outer(self, a: Quantized, b: Quantized) -> torch.Tensor:
        return self.product(a, b)

    def grouped_outer(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        pairs = zip(_of_groups(a, groups), _of_groups(b, groups), strict=True)
        return torch.stack([self.product(left, right) for left, right in pairs])


def _of_groups(matrix: Quantized, groups: Groups) -> Iterator[Quantized]:
    n = len(matrix.scales)
    for _, part in groups.ranges():
        data = matrix.data[n * part.start : n * part.stop].view(n, part.stop - part.start)
        yield Quantized(data, matrix.scales[:, part.start // BLOCK : part.stop // BLOCK], ROWS)


@functools.cache
def backend(device_type: str) -> Backend:
    """Return DeepGEMM on CUDA and the emulation elsewhere. Raises ValueError if the GPU is not supported."""
    if device_type != "cuda":
        return Emulated()
    return DeepGemm()
