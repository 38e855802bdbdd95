"""Operands of block-scaled products, and exact reference products."""

from __future__ import annotations

import torch

from primeslurm.nn.kernels.fp8.blocks import BLOCKS, ROWS, Groups, Quantized, quantize

OFFSETS = (5, 5, 205, 205, 461)
"""Ends of groups of 5, 0, 200, 0 and 256 rows."""


def matrix(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Return random bfloat16 values over some orders of magnitude, so that blocks need different scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[-1])
    return values.bfloat16().to(device)


def groups_and_rows(k: int, device: str) -> tuple[Groups, torch.Tensor]:
    """Return uneven and empty groups, and their rows."""
    groups = Groups.of(torch.tensor(OFFSETS, dtype=torch.int32, device=device))
    return groups, matrix(OFFSETS[-1], k, device=device)


def exact_grouped_product(a: Quantized, b: Quantized, groups: Groups) -> torch.Tensor:
    """Return the product in float64, without padding rows."""
    rows, weights = a.values(torch.float64), b.values(torch.float64)
    owners = groups.owners[groups.places].long()
    return torch.einsum("rk,rnk->rn", rows[groups.places], weights[owners])


def exact_grouped_outer(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the outer product of FP8-quantised rows, in float64."""
    member = torch.nn.functional.one_hot(groups.owners.long() + 1, len(groups.sizes) + 1)[:, 1:].double()
    left, right = (quantize(groups.padded(t).mT, ROWS).values(torch.float64) for t in (a, b))
    return torch.einsum("rg,nr,kr->gnk", member, left, right)


def operands(device: str) -> tuple[Quantized, Quantized, Quantized, Quantized]:
    """Return rows [384, 256] and a weight [128, 256], and for a weight's gradient [128, 384] and [256, 384]."""
    return (
        quantize(matrix(384, 256, device=device), ROWS),
        quantize(matrix(128, 256, device=device, seed=1), BLOCKS),
        quantize(matrix(384, 128, device=device, seed=2).mT, ROWS),
        quantize(matrix(384, 256, device=device, seed=3).mT, ROWS),
    )


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((result.double() - exact).norm() / exact.norm())
