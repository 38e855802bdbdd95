"""The Mamba-2 layer of Nemotron-H."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from primeslurm.nn.kernels import linear_attention
from primeslurm.nn.layers.recurrence import state_space
from primeslurm.nn.layers.scan import NO_BIASES, HeadScan, Tensors, gated, normed_after


class MambaScan(HeadScan):
    """The core of Mamba-2: short convolutions and state space. `c` acts as queries, `b` as keys of a head group."""

    def __init__(self, heads: int, chunk: int, min_step: float) -> None:
        super().__init__(heads, chunk)
        self.min_step = min_step

    def recur(
        self, mixed: Tensors, rest: Tensors, parameters: Tensors, positions: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (c, b, x), (dt,), (dt_bias, a_log, skip) = mixed, rest, parameters
        steps = F.softplus(dt.float() + dt_bias.float()).clamp(min=self.min_step)
        decay = -a_log.float().exp()
        if linear_attention.fits(mixed):
            out, state = linear_attention.state_space(x, steps, decay, b, c, positions, state)
        else:
            out, state = state_space(x, steps, decay, b, c, positions, state, self.chunk)
        return out + x.float() * skip.float().unsqueeze(-1), state


class Mamba2(Module):
    """A Mamba-2 layer: input projection, `MambaScan`, gated norm, output projection."""

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
        """Positions that the scan computes at once. It affects speed only."""
        min_step: float
        """Lower bound of time steps."""
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        inner, mixed = config.heads * config.head_dim, config.groups * config.state
        self.widths = (inner, mixed, mixed)
        self.scan = MambaScan(config.heads, config.chunk, config.min_step)
        self.in_proj = config.in_proj.build()
        self.conv_weight = nn.Parameter(torch.empty(sum(self.widths), 1, config.conv_width))
        self.conv_bias = nn.Parameter(torch.empty(sum(self.widths))) if config.conv_bias else None
        self.dt_bias = nn.Parameter(torch.empty(config.heads))
        # The names follow the checkpoints.
        self.A_log = nn.Parameter(torch.empty(config.heads))
        self.D = nn.Parameter(torch.empty(config.heads))
        self.norm_weight = nn.Parameter(torch.empty(inner))
        self.out_proj = config.out_proj.build()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map [rows, length, dim] to the same shape. State and convolution start at zero where `positions` are 0."""
        gate, mixed, dt = self.in_proj(x).split([self.widths[0], sum(self.widths), self.config.heads], dim=-1)
        biases = NO_BIASES if self.conv_bias is None else self._by_head(self.conv_bias, dim=0)
        conv = (*self._by_head(self.conv_weight.squeeze(1), dim=0), *biases)
        out = self.scan((*self._by_head(mixed, dim=-1), dt), (*conv, self.dt_bias, self.A_log, self.D), positions)
        out, gate = (values.unflatten(-1, (self.config.groups, -1)) for values in (out.flatten(2), gate))
        weight = self.norm_weight.unflatten(0, (self.config.groups, -1))
        return self.out_proj(gated(normed_after, out, gate, weight, self.config.eps).flatten(2))

    def _by_head(self, channels: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        """Split channels into c and b by group, and x by head: the order of queries, keys and values."""
        x, b, c = channels.split(self.widths, dim=dim)
        groups, heads = self.config.groups, self.config.heads
        return tuple(values.unflatten(dim, (count, -1)) for values, count in ((c, groups), (b, groups), (x, heads)))
