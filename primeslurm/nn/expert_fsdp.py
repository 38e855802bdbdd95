"""FSDP of torchtitan's layers, with stacks of experts split by the rule of `expert_splits`.

torchtitan splits stacks between experts if there are at least as many experts as ranks. FSDP then pads uneven splits,
which no checkpoint adapter supports. Splitting the matrix of every expert gives equal shards if the ranks divide its
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from primeslurm.nn.expert_splits import split_dimension


def fully_shard(module: Any, *, mesh: Any, **options: Any) -> Any:
    """Shard a module with FSDP, experts by `expert_splits`. Raises ValueError if the ranks cannot share them evenly."""
    if getattr(module, "moe_enabled", False):
        titan_placement = options.pop("shard_placement_fn", None)
        experts = module.moe.routed_experts.inner_experts
        options["shard_placement_fn"] = _placement(experts, mesh.size(-1), titan_placement)
    return fsdp(module, mesh=mesh, **options)


def _placement(experts: nn.Module, ranks: int, titan_placement: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return FSDP's placement function for a layer. `ranks` is the number of ranks without expert parallelism."""
    names = {parameter: name for name, parameter in experts.named_parameters()}

    def place(parameter: Any) -> Any:
        default = titan_placement(parameter) if titan_placement else None
        if parameter not in names:
            return default
        if not isinstance(default, ShardPlacementResult):
            dimension = split_dimension(parameter.shape, ranks)
            # If no dimension is even, FSDP pads dimension 0, which works for stacks that checkpoints store whole.
            return Shard(dimension or 0)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        ranks_per_expert = default.mesh_info.shard_mesh_size
        dimension = split_dimension(local.shape, ranks_per_expert)
        if dimension is None:
            shape = " x ".join(map(str, local.shape))
            raise ValueError(
                f"{ranks_per_expert} ranks hold the same experts, and cannot share {names[parameter]} ({shape}) evenly"
            )
        return ShardPlacementResult(Shard(dimension), default.mesh_info)

    return place
