"""Feed-forward networks and experts of two matrices with a squared ReLU between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module

from primeslurm.nn.kernels import host_value_cache
from primeslurm.nn.layers.common import build_parts
from primeslurm.nn.layers.moe import local

EXPERT_PARAMETERS = ("w1_EFD", "w2_EDF")


class Relu2FeedForward(Module):
    """Feed-forward network w2(relu(w1(x))^2)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        build_parts(self, config, "w1", "w2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.relu(self.w1(x)).square())


class Relu2Experts(GroupedExperts):
    """Experts that each compute w2(relu(w1(x))^2)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # skip the parameters of GroupedExperts
        self.num_experts = config.num_experts
        self.w1_EFD = nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, config.dim))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs for tokens [rows, dim], which are sorted by expert."""
        w1, w2 = (local(getattr(self, name), x_RD.dtype).transpose(-2, -1) for name in EXPERT_PARAMETERS)
        offsets = host_value_cache.ends(num_tokens_per_expert_E)
        hidden = F.relu(self._grouped_mm(A=x_RD, B_t=w1, offs=offsets)).square()
        return self._grouped_mm(A=hidden, B_t=w2, offs=offsets)


class LatentExperts(RoutedExperts):
    """Experts that compute in a narrower hidden size, so that ranks exchange fewer bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        down: Linear.Config
        up: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        build_parts(self, config, "down", "up")

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        narrow = super().forward(self.down(x_BLD), topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        return self.up(narrow)
