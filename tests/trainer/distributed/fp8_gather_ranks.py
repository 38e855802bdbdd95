"""A rank that trains sharded experts, with and without the FP8 all-gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torchtitan.models.common.moe import GroupedExperts

from primeslurm.nn.expert_splits import split_dimension
from primeslurm.nn.layers.fp8 import with_fp8_products
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.components import fp8_gather
from primeslurm.trainer.distributed.world import join

STEPS = 2
SHAPES = {"experts": (6, 128, 256), "matrices": (4, 384, 384), "parts of blocks": (4, 384, 192)}
"""Experts, hidden size, token size. Three ranks can share experts, whole blocks of each expert, or neither."""


class Model(nn.Module):
    """Two layers of experts, and a head that is not gathered in FP8."""

    def __init__(self, experts: int, width: int, dim: int) -> None:
        super().__init__()
        config = GroupedExperts.Config(dim=dim, hidden_dim=width, num_experts=experts)
        self.experts = nn.ModuleList(config.build() for _ in range(2))
        for layer in self.experts:
            layer.__class__ = with_fp8_products(GroupedExperts)
        self.head = nn.Linear(dim, 8)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        actual: torch.Tensor = self.head(sum(layer(rows, counts) for layer in self.experts))
        return actual


def train(shape: tuple[int, int, int], in_fp8: bool, reshard: bool) -> tuple[list[torch.Tensor], int]:
    """Return losses, gradients and weights of some steps, and the number of stacks gathered in FP8."""
    torch.manual_seed(5)
    model, ranks = Model(*shape), dist.get_world_size()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    dimension = split_dimension(shape, ranks) or 0
    mesh = init_device_mesh("cpu", (ranks,))
    settings: dict[str, Any] = {"reshard_after_forward": reshard}
    settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    other = DeviceMesh.from_group(dist.new_group(), "cpu")  # layers need not share their ranks' group
    for layer, its in zip(model.experts, (mesh, other), strict=True):
        fully_shard(layer, mesh=its, shard_placement_fn=lambda _: Shard(dimension), **settings)
    fully_shard(model, mesh=mesh, **settings)
    gather = fp8_gather.install(model) if in_fp8 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        counts = torch.randint(0, 40, (shape[0],))
        for _ in range(2):  # micro batches
            loss = model(torch.randn(int(counts.sum()), shape[2]), counts).float().square().mean()
            loss.backward()
        optimizer.step()
        local = [(p.detach().to_local().clone(), p.grad.to_local().clone()) for p in model.parameters()]  # type: ignore
        seen += [loss.detach(), *(tensor for pair in local for tensor in pair)]
        optimizer.zero_grad()
    assert gather is None or len(gather._by_group) == 2
    return seen, len(gather._stacks) if gather else 0


def main() -> None:
    """Print the number of stacks gathered in FP8 in each case."""
    join(Interrupt(), timeout_s=600)
    for name, shape in SHAPES.items():
        for reshard in (True, False):
            actual, stacks = train(shape, True, reshard)
            expected, _ = train(shape, False, reshard)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True)), name
            print(f"STACKS {name}: {stacks}", flush=True)


if __name__ == "__main__":
    main()
