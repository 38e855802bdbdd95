"""RMSNorm and a gate between a recurrence and the projection behind it.

Inputs are [rows, length, groups, size], outputs of the recurrence as float32; the norm is within each group, and its
weight is [size] or [groups, size]. What is returned has the gate's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from primeslurm.nn.kernels import elementwise
from primeslurm.nn.layers.scan import Tensors, in_parts

Gating = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def gated(gating: Gating, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm and gate outputs: in one kernel, which keeps no more than its inputs, or in parts of rows.

    Args:
        gating: `normed_before` or `normed_after`.
        x: of the recurrence.
        gate: of x's shape.
        weight: of the norm.
        eps: of the norm.
    """
    if elementwise.fits(gate):
        return elementwise.fused(gating)(x, gate, weight, eps)

    def part(_: Tensors, inputs: Tensors) -> tuple[torch.Tensor, Tensors]:
        return gating(inputs[0], inputs[1], weight, eps), ()

    return in_parts(part, (), (x, gate))


def normed_before(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm, then gate (gated delta nets)."""
    return (weight.float() * _normed(x, eps) * F.silu(gate.float())).to(gate.dtype)


def normed_after(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Gate, then norm (Mamba-2)."""
    return (weight.float() * _normed(x * F.silu(gate.float()), eps)).to(gate.dtype)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
