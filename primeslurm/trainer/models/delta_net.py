"""The gated delta net: linear attention whose state decays and is corrected, not only added to."""

from __future__ import annotations

from dataclasses import dataclass

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from primeslurm.trainer.models.recurrence import causal_conv, gated_delta_rule


class DeltaNet(Module):
    """Projections, short convolution, gated delta rule, gated norm, projection."""

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
        """Of one head."""
        value_dim: int
        """Of one head."""
        conv_width: int
        eps: float

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        self.widths = (keys, keys, values)
        self.in_proj_qkv = config.in_proj_qkv.build()
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_a = config.in_proj_a.build()
        self.in_proj_b = config.in_proj_b.build()
        self.conv_weight = nn.Parameter(torch.empty(sum(self.widths), 1, config.conv_width))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.norm_weight = nn.Parameter(torch.empty(config.value_dim))
        self.out_proj = config.out_proj.build()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, length, dim] to the same; state and convolution begin anew where `positions` are 0."""
        config = self.config
        dims = (config.key_dim, config.key_dim, config.value_dim)
        mixed = causal_conv(self.in_proj_qkv(x), self.conv_weight, None, positions)
        q, k, v = (
            part.unflatten(-1, (-1, dim)) for part, dim in zip(mixed.split(self.widths, dim=-1), dims, strict=True)
        )
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out = gated_delta_rule(
            q.repeat_interleave(config.value_heads // config.key_heads, dim=2),
            k.repeat_interleave(config.value_heads // config.key_heads, dim=2),
            v,
            log_decay=-self.A_log.float().exp() * step,
            beta=torch.sigmoid(self.in_proj_b(x)),
            positions=positions,
        )
        gate = self.in_proj_z(x).unflatten(-1, (-1, config.value_dim))
        return self.out_proj(self._norm(out, gate).flatten(2).to(x.dtype))

    def _norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm within each head, before the gate."""
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps)
        return self.norm_weight.float() * normed * F.silu(gate.float())
