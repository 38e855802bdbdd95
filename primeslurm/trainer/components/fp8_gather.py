"""Experts' weights travel in FP8: FSDP gathers what their products take, half of the bytes of bfloat16.

Each rank quantises its shards, by scales of whole blocks that all ranks work out before a forward pass. What is
gathered is, bit for bit, what quantising the gathered weights would give, and modules see a `hollow` tensor in
its place: gradients are in the compute dtype as before. Experts are most of a large model, and their stacks split into
whole blocks; other weights, whose shards often do not, are gathered in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from primeslurm.nn.expert_splits import whole_blocks
from primeslurm.nn.kernels.fp8 import placeholder_tensor
from primeslurm.nn.kernels.fp8.blocks import BLOCK, BLOCKS, Quantized, amax_of_blocks, encode_blocks, scales_of
from primeslurm.nn.layers.fp8 import FP8Experts
from primeslurm.trainer.components import lora


class _Stack:
    """A stack of experts' matrices [experts, n, k] that this rank holds a part of. FSDP calls it as its extension."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        dimension, mesh = parameter.fsdp_placement.dim, parameter.mesh_info
        self.group: dist.ProcessGroup = mesh.shard_process_group
        self.dtype: torch.dtype = parameter.mp_policy.param_dtype or parameter.orig_dtype
        experts, n, k = parameter._orig_size
        self.blocks = torch.Size((experts, n // BLOCK, k // BLOCK))
        share = self.blocks[dimension] // mesh.shard_mesh_size
        self._own = dimension, mesh.shard_mesh_rank * share, share
        self.scales = torch.empty(0)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part."""
        shard: torch.Tensor = self._parameter._sharded_local_tensor
        return shard

    def own(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """This rank's part of something [experts, blocks, blocks]."""
        return of_blocks.narrow(*self._own)

    def extend(self) -> None:
        """Have FSDP call this. What it asks is the tensor that it gathers."""
        self.shard.fsdp_pre_all_gather = self._before  # type: ignore[attr-defined]
        self.shard.fsdp_post_all_gather = self._after  # type: ignore[attr-defined]

    def _before(
        self,
        mesh: DeviceMesh,
        size: torch.Size,
        stride: tuple[int, ...],
        module: nn.Module,
        precision: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        data = encode_blocks(self.shard, self.own(self.scales), self.dtype)
        return (data.view(torch.uint8),), None

    def _after(
        self, gathered: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        if out is not None:
            return None  # it stands for the same memory, which is filled anew
        size = self._parameter._orig_size
        data = gathered[0].view(size).view(torch.float8_e4m3fn)
        return placeholder_tensor.stand_in(Quantized(data, self.scales, BLOCKS), size, dtype, data.device), ()


class FP8Gather:
    """The stacks of a model's experts, and scales for all of their blocks: those that the same ranks share together."""

    def __init__(self, stacks: list[_Stack]) -> None:
        groups = {stack.group: [one for one in stacks if one.group is stack.group] for stack in stacks}
        self._stacks = [stack for alike in groups.values() for stack in alike]
        sizes = [stack.blocks.numel() for stack in self._stacks]
        self._scales = torch.ones(sum(sizes), device=stacks[0].shard.device)
        for stack, scales in zip(self._stacks, self._scales.split(sizes), strict=True):
            stack.scales = scales.view(stack.blocks)
            stack.extend()
        shared = [sum(stack.blocks.numel() for stack in alike) for alike in groups.values()]
        self._shared = list(zip(groups, self._scales.split(shared), strict=True))

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Work out scales anew, once for a forward pass and its backward pass. All ranks call it together."""
        self._scales.zero_()
        for stack in self._stacks:
            stack.own(stack.scales).copy_(amax_of_blocks(stack.shard, stack.dtype))
        for group, scales in self._shared:
            if group.size() > 1:
                dist.all_reduce(scales, dist.ReduceOp.MAX, group)
        self._scales.copy_(scales_of(self._scales))


def install(model: nn.Module) -> FP8Gather | None:
    """Have a sharded model's FP8 experts gathered in FP8. Call it when it has memory. None: there is nothing to do."""
    stacks = [_Stack(parameter) for parameter in _parameters(model) if _fits(parameter)]
    if not stacks:
        return None
    gather = FP8Gather(stacks)
    # Before FSDP's own hook, behind which its streams no longer wait for what is computed here.
    model.register_forward_pre_hook(gather.refresh, prepend=True)
    return gather


def _parameters(model: nn.Module) -> Iterator[Any]:
    """What FSDP knows of each parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def _fits(parameter: Any) -> bool:
    """Whether a parameter is taken by FP8 products alone, and each rank's shard of it is whole blocks."""
    info, size = parameter._module_info, parameter._orig_size
    multiplies = isinstance(info.module, FP8Experts) and type(info.module)._grouped_mm is FP8Experts._grouped_mm
    if not multiplies or lora.is_adapter(info.param_name) or len(size) != 3 or parameter.offload_to_cpu:
        return False
    return whole_blocks(size, parameter.fsdp_placement.dim, parameter.mesh_info.shard_mesh_size, BLOCK)
