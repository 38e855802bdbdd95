"""Checkpoints that hold the experts of a layer in two stacks: gate beside up, and down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate

from primeslurm.nn.adapters.table import ROUTED_EXPERTS
from primeslurm.nn.layers.vision import VisionAdapter

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class StackedAdapter(VisionAdapter):
    """Names of checkpoints with stacked experts, [experts, out, in]. `names` is that of all other tensors."""

    experts: ClassVar[str]
    """Module that holds the experts of a layer; `{}` is the layer."""
    transposed: ClassVar[bool] = False
    """Whether stacks are [experts, in, out] instead."""

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Our tensors under checkpoint names. Raises KeyError for one that the table does not have."""
        ours = {name: tensor for name, tensor in state_dict.items() if ".inner_experts." in name}
        converted = super().to_hf({name: tensor for name, tensor in state_dict.items() if name not in ours})
        for name, tensor in ours.items():
            prefix, kind = name.rsplit(".", 1)
            theirs = self.experts.format(prefix.split(".")[1])
            if kind == "w1_EFD":
                up = ours[f"{prefix}.w3_EFD"]
                converted[f"{theirs}.{GATE_UP}"] = _locally(lambda g, u: self._turned(torch.cat([g, u], 1)), tensor, up)
            elif kind == "w2_EDF":
                converted[f"{theirs}.{DOWN}"] = _locally(self._turned, tensor)
        return converted

    def from_hf(self, hf_state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `to_hf` made, or a whole checkpoint, under our names. Raises KeyError for an unknown name."""
        theirs = {name: tensor for name, tensor in hf_state_dict.items() if ".mlp.experts." in name}
        converted = super().from_hf({name: tensor for name, tensor in hf_state_dict.items() if name not in theirs})
        for name, tensor in theirs.items():
            ours = ROUTED_EXPERTS.format(name.removeprefix(self.experts.partition("{}")[0]).split(".")[0])
            if name.endswith(DOWN):
                converted[ours + "w2_EDF"] = _locally(self._turned, tensor)
            else:
                converted[ours + "w1_EFD"] = _locally(lambda both: self._turned(both).chunk(2, 1)[0], tensor)
                converted[ours + "w3_EFD"] = _locally(lambda both: self._turned(both).chunk(2, 1)[1], tensor)
        return converted

    def _turned(self, stack: torch.Tensor) -> torch.Tensor:
        return stack.mT if self.transposed else stack


def stacked(adapter: Any) -> type[StackedAdapter] | None:
    """What names the experts of an adapter's family where they are stacked; None if they never are."""
    return type(adapter) if isinstance(adapter, StackedAdapter) else getattr(adapter, "stacked", None)


def adapter_for_checkpoint(adapter: Any, names: Iterable[str]) -> Any:
    """What names the tensors of a checkpoint that has `names`: the adapter, or that of its family's stacked experts."""
    stacks = stacked(adapter)
    if stacks is None or isinstance(adapter, stacks) or not any(name.endswith(f".{GATE_UP}") for name in names):
        return adapter
    return stacks(adapter.model_config, None)


def _locally(change: Callable[..., torch.Tensor], *stacks: Any) -> Any:
    """`change`, which leaves the first dimension alone, of each rank's part of stacks that are split by it.

    Where experts do not come out even among ranks, another dimension is split, too; along it they are gathered first.
    """
    if not isinstance(stacks[0], DTensor):
        return change(*stacks)
    mesh, placements = stacks[0].device_mesh, stacks[0].placements
    if any(placement.is_shard() and not placement.is_shard(0) for placement in placements):
        placements = tuple(place if place.is_shard(0) else Replicate() for place in placements)
        stacks = tuple(stack.redistribute(placements=placements) for stack in stacks)
    local = change(*(stack.to_local() for stack in stacks)).contiguous()
    shape = torch.Size([len(stacks[0]), *local.shape[1:]])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=local.stride())
