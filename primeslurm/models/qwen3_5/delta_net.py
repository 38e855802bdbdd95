"""The gated delta net: linear attention whose state decays, and whose values are corrected rather than added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from primeslurm.nn.block_sizes import DELTA_CHUNK
from primeslurm.nn.kernels import linear_attention
from primeslurm.nn.layers.common import build_parts
from primeslurm.nn.layers.recurrence import gated_delta_rule
from primeslurm.nn.layers.scan import NO_BIASES, HeadScan, Tensors, gated, normed_before


class DeltaScan(HeadScan):
    """The core of a gated delta net: short convolutions, then the gated delta rule."""

    def recur(
        self, mixed: Tensors, rest: Tensors, parameters: Tensors, positions: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (q, k, v), (a, b), (dt_bias, a_log) = mixed, rest, parameters
        log_decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        beta = torch.sigmoid(b)
        if linear_attention.fits(mixed):
            return linear_attention.gated_delta_rule(q, k, v, log_decay, beta, positions, state)
        # The kernels read shared heads in place. This recurrence needs a copy per head of values.
        q, k = (values.repeat_interleave(v.shape[2] // values.shape[2], dim=2) for values in (q, k))
        return gated_delta_rule(q, k, v, log_decay, beta, positions, state, self.chunk)


class DeltaNet(Module):
    """A gated delta net layer: input projections, `DeltaScan`, gated norm, output projection."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_a: Linear.Config
        in_proj_b: Linear.Config
        out_proj: Linear.Config
        key_heads: int
        value_heads: int
        key_dim: int
        """Per head."""
        value_dim: int
        """Per head."""
        conv_width: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        self.widths = (keys, keys, values)
        self.head_dims = (config.key_dim, config.key_dim, config.value_dim)
        self.scan = DeltaScan(config.value_heads, DELTA_CHUNK)
        build_parts(self, config, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
        self.conv_weight = nn.Parameter(torch.empty(sum(self.widths), 1, config.conv_width))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.norm_weight = nn.Parameter(torch.empty(config.value_dim))
        self.out_proj = config.out_proj.build()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map [rows, length, dim] to the same shape. State and convolution start at zero where `positions` are 0."""
        mixed = self._by_head(self.in_proj_qkv(x), dim=-1)
        by_head = (*self._by_head(self.conv_weight.squeeze(1), dim=0), *NO_BIASES, self.dt_bias, self.A_log)
        out = self.scan((*mixed, self.in_proj_a(x), self.in_proj_b(x)), by_head, positions)
        gate = self.in_proj_z(x).unflatten(-1, (-1, self.config.value_dim))
        return self.out_proj(gated(normed_before, out, gate, self.norm_weight, self.config.eps).flatten(2))

    def _by_head(self, channels: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Split channels into queries, keys and values, each by head."""
        split = channels.split(self.widths, dim=dim)
        return [values.unflatten(dim, (-1, size)) for values, size in zip(split, self.head_dims, strict=True)]
