"""FSDP all-gather of expert weights in FP8, which halves the traffic compared to bfloat16.

Before a forward pass, all ranks compute the scales of whole blocks together, and each rank quantizes its shards. The
gathered data equal, bit for bit, the quantization of the gathered weights. Modules see a placeholder tensor instead of
the weight, so that gradients stay in the compute dtype.
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
    """A sharded stack of expert matrices [experts, n, k]. FSDP calls `_before` and `_after` around its all-gather."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        dimension, mesh = parameter.fsdp_placement.dim, parameter.mesh_info
        self.group: dist.ProcessGroup = mesh.shard_process_group
        self.dtype: torch.dtype = parameter.mp_policy.param_dtype or parameter.orig_dtype
        experts, n, k = parameter._orig_size
        self.blocks = torch.Size((experts, n // BLOCK, k // BLOCK))
        share = self.blocks[dimension] // mesh.shard_mesh_size
        self._local_slice = dimension, mesh.shard_mesh_rank * share, share
        self.scales = torch.empty(0)

    @property
    def shard(self) -> torch.Tensor:
        shard: torch.Tensor = self._parameter._sharded_local_tensor
        return shard

    def local(self, of_blocks: torch.Tensor) -> torch.Tensor:
        return of_blocks.narrow(*self._local_slice)

    def extend(self) -> None:
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
        data = encode_blocks(self.shard, self.local(self.scales), self.dtype)
        return (data.view(torch.uint8),), None  # NCCL has no FP8 dtype

    def _after(
        self, gathered: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        if out is not None:
            return None  # the existing placeholder refers to the same memory, which FSDP has refilled
        size = self._parameter._orig_size
        data = gathered[0].view(size).view(torch.float8_e4m3fn)
        return placeholder_tensor.create(Quantized(data, self.scales, BLOCKS), size, dtype, data.device), ()


class FP8Gather:
    """All FP8 expert stacks of a model. Stacks on the same ranks share a scale buffer, so one all-reduce is enough."""

    def __init__(self, stacks: list[_Stack]) -> None:
        by_group = {stack.group: [each for each in stacks if each.group is stack.group] for stack in stacks}
        self._stacks = [stack for group_stacks in by_group.values() for stack in group_stacks]
        sizes = [stack.blocks.numel() for stack in self._stacks]
        self._scales = torch.ones(sum(sizes), device=stacks[0].shard.device)
        for stack, scales in zip(self._stacks, self._scales.split(sizes), strict=True):
            stack.scales = scales.view(stack.blocks)
            stack.extend()
        counts = [sum(stack.blocks.numel() for stack in group_stacks) for group_stacks in by_group.values()]
        self._by_group = list(zip(by_group, self._scales.split(counts), strict=True))

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Compute the scales for the next forward and backward pass. A collective."""
        self._scales.zero_()
        for stack in self._stacks:
            stack.local(stack.scales).copy_(amax_of_blocks(stack.shard, stack.dtype))
        for group, scales in self._by_group:
            if group.size() > 1:
                dist.all_reduce(scales, dist.ReduceOp.MAX, group)
        self._scales.copy_(scales_of(self._scales))


def install(model: nn.Module) -> FP8Gather | None:
    """Install the FP8 all-gather on a sharded, allocated model. Return None if no parameter supports it."""
    stacks = [_Stack(parameter) for parameter in _parameters(model) if _fits(parameter)]
    if not stacks:
        return None
    gather = FP8Gather(stacks)
    # Run this before FSDP's own hook. FSDP's streams do not wait for computations after that hook.
    model.register_forward_pre_hook(gather.refresh, prepend=True)
    return gather


def _parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def _fits(parameter: Any) -> bool:
    """Return whether only FP8 products use a parameter, and no FP8 block is split between ranks."""
    # Experts hold most of a large model's weights. Shards of other weights often split blocks.
    info, size = parameter._module_info, parameter._orig_size
    multiplies = isinstance(info.module, FP8Experts) and type(info.module)._grouped_mm is FP8Experts._grouped_mm
    if not multiplies or lora.is_adapter(info.param_name) or len(size) != 3 or parameter.offload_to_cpu:
        return False
    return whole_blocks(size, parameter.fsdp_placement.dim, parameter.mesh_info.shard_mesh_size, BLOCK)
