"""The Mamba-2 layer."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from primeslurm.trainer.models.recurrence import causal_conv, state_space


class Mamba2(Module):
    """Projection, short convolution, selective state space, gated norm, projection."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_proj: Linear.Config
        out_proj: Linear.Config
        heads: int
        head_dim: int
        groups: int
        state: int
        conv_width: int
        conv_bias: bool
        chunk: int
        """Positions in a chunk of the scan; a matter of speed alone."""
        shortest_step: float
        """Lower bound of time steps."""
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        inner, mixed = config.heads * config.head_dim, config.groups * config.state
        self.widths = (inner, mixed, mixed)
        self.in_proj = config.in_proj.build()
        self.conv_weight = nn.Parameter(torch.empty(sum(self.widths), 1, config.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(sum(self.widths))) if config.conv_bias else None
        self.dt_bias = nn.Parameter(torch.empty(config.heads))
        self.A_log = nn.Parameter(torch.empty(config.heads))
        self.D = nn.Parameter(torch.empty(config.heads))
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.out_proj = config.out_proj.build()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, length, dim] to the same; state and convolution begin anew where `positions` are 0."""
        config = self.config
        gate, mixed, dt = self.in_proj(x).split([self.widths[0], sum(self.widths), config.heads], dim=-1)
        values, b, c = causal_conv(mixed, self.conv_weight, self.conv_bias, positions).split(self.widths, dim=-1)
        values = values.unflatten(-1, (config.heads, -1))
        out = state_space(
            values,
            F.softplus(dt.float() + self.dt_bias.float()).clamp(min=config.shortest_step),
            -self.A_log.float().exp(),
            b.unflatten(-1, (config.groups, -1)),
            c.unflatten(-1, (config.groups, -1)),
            positions,
            config.chunk,
        )
        out = out + values.float() * self.D.float().unsqueeze(-1)
        return self.out_proj(self._norm(out.flatten(2), gate).to(x.dtype))

    def _norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm within each group, after the gate."""
        grouped = (x * F.silu(gate.float())).unflatten(-1, (self.config.groups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.config.eps)
        return self.norm_weight.float() * grouped.flatten(-2)
