"""FSDP of torchtitan's layers, with stacks of experts split by the rule of `expert_splits`.

torchtitan splits stacks between experts if there are at least as many experts as ranks. FSDP then pads uneven splits,
which no checkpoint adapter supports. Splitting through every expert is even for the same ranks.
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
    """Shard a module as FSDP's function does, but the experts in it, if it is a layer that has some, by our rule.

    Raises:
        ValueError: ranks cannot share the experts evenly.
    """
    if getattr(module, "moe_enabled", False):
        given = options.pop("shard_placement_fn", None)
        options["shard_placement_fn"] = _placement(module.moe.routed_experts.inner_experts, mesh.size(-1), given)
    return fsdp(module, mesh=mesh, **options)


def _placement(experts: nn.Module, ranks: int, given: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """What tells FSDP how to split a parameter of a layer; `given` is torchtitan's, `ranks` are those without EP."""
    names = {parameter: name for name, parameter in experts.named_parameters()}

    def place(parameter: Any) -> Any:
        theirs = given(parameter) if given else None
        if parameter not in names:
            return theirs
        if not isinstance(theirs, ShardPlacementResult):
            dimension = split_dimension(parameter.shape, ranks)
            return Shard(dimension or 0)  # 0 at worst: FSDP fills up, and stacks that stay whole in checkpoints can be
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sharing = theirs.mesh_info.shard_mesh_size
        dimension = split_dimension(held.shape, sharing)
        if dimension is None:
            what = " x ".join(map(str, held.shape))
            raise ValueError(
                f"{sharing} ranks hold the same experts, and cannot share {names[parameter]} ({what}) evenly"
            )
        return ShardPlacementResult(Shard(dimension), theirs.mesh_info)

    return place
