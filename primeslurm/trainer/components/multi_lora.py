"""Several adapters on one frozen weight at once: each token computes with the adapter of the run it belongs to.

Nothing uses it yet. It is the base of training several runs on one model: rows of different runs share a pass over the
frozen weights, and each adapter gets the gradient of its own tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear


@dataclass(frozen=True)
class Assignment:
    """Which adapter each token computes with. Made once per micro batch, used by every layer."""

    order: torch.Tensor
    """[tokens] int64: tokens sorted by adapter."""
    offsets: torch.Tensor
    """[adapters] int32: where each adapter's tokens end in that order."""

    @classmethod
    def of(cls, owners: torch.Tensor, adapters: int) -> Assignment:
        """Sort tokens by the adapter of each, [rows, len], every one of them below `adapters`."""
        flat = owners.flatten()
        counts = torch.bincount(flat, minlength=adapters)
        return cls(flat.argsort(stable=True), counts.cumsum(0, dtype=torch.int32))


class MultiLora(nn.Module):
    """Adapters for one linear layer, which stays as it is: `forward` computes what they add to its output.

    Args:
        scales: alpha / rank of each adapter.
    """

    scales: torch.Tensor

    def __init__(self, linear: Linear, rank: int, scales: Sequence[float]) -> None:
        super().__init__()
        count = len(scales)
        self.a = nn.Parameter(linear.weight.new_empty(count, linear.in_features, rank))
        self.b = nn.Parameter(linear.weight.new_zeros(count, linear.out_features, rank))
        nn.init.uniform_(self.a, -(linear.in_features**-0.5), linear.in_features**-0.5)
        self.register_buffer("scales", linear.weight.new_tensor(list(scales)))

    def forward(self, input: torch.Tensor, assignment: Assignment) -> torch.Tensor:
        """Map [rows, len, in_features] to the change of the output, [rows, len, out_features]."""
        rows = input.flatten(0, -2)[assignment.order]
        down = F.grouped_mm(rows, self.a, offs=assignment.offsets)
        up = F.grouped_mm(down, (self.b * self.scales[:, None, None]).mT, offs=assignment.offsets)
        return torch.empty_like(up).index_copy(0, assignment.order, up).view(*input.shape[:-1], -1)
