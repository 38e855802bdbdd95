"""Matrix products of block-scaled FP8 operands: what a backend has to compute, and which one a device has."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import torch

from primeslurm.nn.kernels.fp8.blocks import BLOCK, ROWS, Groups, Quantized
from primeslurm.nn.kernels.fp8.deep_gemm import DeepGemm


class Backend(Protocol):
    """Products of quantised operands, accumulated in float32."""

    def product(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """Multiply a [m, k] in ROWS by b [n, k] in BLOCKS: [m, n]."""

    def grouped_product(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        """Multiply each row of a [padded rows, k] in ROWS by its group's b [groups, n, k] in BLOCKS: [padded rows, n].

        Padding rows of the result are undefined.
        """

    def outer(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """Multiply a [n, rows] by b [k, rows], both in ROWS: [n, k] in float32."""

    def grouped_outer(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        """Do the same for each group of what `quantize_groups_transposed` makes: [groups, n, k] in float32."""


class Emulated:
    """What the kernels compute, in float32: exact up to the order of summation. For machines without FP8."""

    def product(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """See Backend."""
        return a.values() @ b.values().mT

    def grouped_product(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        """See Backend."""
        rows, weights = a.values(), b.values()
        return torch.cat([rows[part] @ weights[group].mT for group, part in groups.ranges()])

    def outer(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """See Backend."""
        return self.product(a, b)

    def grouped_outer(self, a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
        """See Backend."""
        pairs = zip(_of_groups(a, groups), _of_groups(b, groups), strict=True)
        return torch.stack([self.product(left, right) for left, right in pairs])


def _of_groups(matrix: Quantized, groups: Groups) -> Iterator[Quantized]:
    """Each group's matrix of what `quantize_groups_transposed` made."""
    n = len(matrix.scales)
    for _, part in groups.ranges():
        data = matrix.data[n * part.start : n * part.stop].view(n, part.stop - part.start)
        yield Quantized(data, matrix.scales[:, part.start // BLOCK : part.stop // BLOCK], ROWS)


@functools.cache
def backend(device_type: str) -> Backend:
    """DeepGEMM on CUDA, emulation elsewhere. Raises ValueError if this GPU has no such kernels."""
    if device_type != "cuda":
        return Emulated()
    return DeepGemm()
