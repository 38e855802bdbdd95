"""All uses of internals of torchtitan and torch, and patches of them.

Package `nn` imports this module before any module of torchtitan. A patch checks that the attribute it replaces exists,
and other versions of torchtitan are rejected, because a patch that does not fit could fail silently.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import torch._utils
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch.distributed import GroupName, ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention._fa4 import register_flash_attention_fa4
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

SUPPORTED = "0.3.0"
ON_CPU = not torch.cuda.is_available()


def _replace(owner: Any, name: str, value: Any) -> Any:
    if not hasattr(owner, name):
        where = owner.__name__ if isinstance(owner, ModuleType | type) else repr(owner)
        raise RuntimeError(f"{where}.{name} does not exist: this version of torch or torchtitan is not supported")
    old = getattr(owner, name)
    setattr(owner, name, value)
    return old


def _without_triton(name: str) -> Any:
    """Return a stand-in for a function of a Triton kernel module. It can be imported, but not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{name} needs Triton, which is not installed")

    return missing


if version("torchtitan") != SUPPORTED:
    raise RuntimeError(f"torchtitan {version('torchtitan')} is installed, but only {SUPPORTED} is supported")
if ON_CPU:
    # torchtitan selects its device at import, and would fall back to "cuda".
    _replace(torch._utils, "_get_available_device_type", lambda: "cpu")
    # torchtitan imports Triton for an expert-parallel backend that we do not use.
    if importlib.util.find_spec("triton") is None:
        _kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
        _kernels.__getattr__ = _without_triton  # type: ignore[method-assign]
        sys.modules[_kernels.__name__] = _kernels

import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402
import torchtitan.models.common.attention as titan_attention  # noqa: E402
import torchtitan.tools.utils as titan_utils  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.utils import MoEStateDictAdapter  # noqa: E402

from primeslurm.nn import expert_fsdp, one_rank  # noqa: E402
from primeslurm.nn.kernels import flash_attention, host_value_cache  # noqa: E402

if not ON_CPU:
    # torchtitan selects FlashAttention 3 or 4 by the GPU's generation, even if it is not installed.
    _best = partial(flash_attention.best, titan_utils.get_cuda_flash_attention_impl, register_flash_attention_fa4)
    _replace(titan_utils, "get_cuda_flash_attention_impl", _best)


# torch's differentiable collectives, which activation checkpointing can save, have no public name yet.
def all_gather(tensor: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Gather the tensors of all ranks, concatenated along `dim`. The backward pass reduce-scatters the gradients."""
    parts = _waited(collectives.all_gather_single(tensor.contiguous(), 0, group)).unflatten(0, (group.size(), -1))
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def all_to_all(
    tensor: torch.Tensor,
    group: ProcessGroup | GroupName,
    receive: list[int] | None = None,
    send: list[int] | None = None,
) -> torch.Tensor:
    """Exchange rows [sum(send), ...] with all ranks of a group, in rank order. Differentiable.

    `receive` and `send` are the numbers of rows from and to each rank. None: all are equal.
    """
    return _waited(collectives.all_to_all_single(tensor, receive, send, group))


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    # Compiled code cannot take a tensor that is still in flight. Only direct results of a collective may wait like
    # this, because autograd would lose later operations.
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def dense(mask_mod: Callable[..., torch.Tensor], rows: int, queries: int, keys: int, on: torch.device) -> torch.Tensor:
    """Evaluate `mask_mod` for all pairs: a bool mask [rows, 1, queries, keys] of visible keys, alike for all heads."""
    # One call with broadcast indices. torch's `create_mask` uses vmap, which takes ten times as long on a CPU, a
    # seventh of the step of a small model.
    row, query, key = (torch.arange(size, device=on) for size in (rows, queries, keys))
    seen = mask_mod(row.view(-1, 1, 1, 1), row.new_zeros(()), query.view(-1, 1), key)
    return seen.expand(rows, 1, queries, keys)


# Without CUDA, flex attention has no backward pass, and varlen attention has no kernel.
class DenseAttention(titan_attention.FlexAttention):
    """Computes FlexAttention with a dense mask and SDPA, for devices without CUDA. Needs quadratic memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_attention.FlexAttention.Config):
        """torchtitan's config, unchanged. It builds a DenseAttention."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Compute attention of queries, keys and values [batch, length, heads, head_dim].

        `out_transform` gets the outputs and the log-sum-exp of the scores [batch, length, heads].
        """
        if any(value is not None for value in unsupported.values()):
            raise NotImplementedError(f"dense attention does not support {', '.join(unsupported)}")
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        mask = dense(attention_masks.mask_mod, attention_masks.shape[0], q.shape[2], k.shape[2], q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(
            1, 2
        )
        if out_transform is None:
            return out
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
        scores = (scores * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~mask, -torch.inf)
        return out_transform(out, scores.logsumexp(dim=-1).transpose(1, 2))


class AnyDtypeExperts(GroupedExperts):
    """GroupedExperts that compute in the dtype of their input, instead of always in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's config, unchanged. It builds AnyDtypeExperts."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply the experts' SwiGLU to tokens sorted by expert [rows, dim]."""
        offsets = host_value_cache.ends(num_tokens_per_expert_E)
        gate = self.project("w1_EFD", x_RD, offsets)
        up = self.project("w3_EFD", x_RD, offsets)
        return self.project("w2_EDF", F.silu(gate) * up, offsets)

    def project(self, name: str, x_RD: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Multiply rows [rows, in], sorted by expert, by their expert's matrix `name` [experts, out, in].

        `offsets` [experts] are the ends of the experts' rows. Returns [rows, out].
        """
        return self._grouped_mm(A=x_RD, B_t=self.local(name, x_RD.dtype).transpose(-2, -1), offs=offsets)

    def local(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        parameter = getattr(self, name)
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(dtype)


# torch has no public function for the region of a distributed tensor that a rank holds, and no public way to keep a
# shard on another device than that of its mesh.
def local_region(tensor: DTensor) -> tuple[slice, ...]:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the spec of `like` and the shard `local`, on any device. For other tensors: `local`."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local


def swap(
    model_config: Any, base: Any, replacement: Any, where: Callable[[str, Any], bool] = lambda name, config: True
) -> None:
    """Replace each `base.Config` for which `where(name, config)` is true by a `replacement.Config` of equal values."""
    for name, config, parent, attribute in list(model_config.traverse(base.Config)):
        if type(config) is not base.Config or not where(name, config):
            continue
        new = replacement.Config(**{f.name: getattr(config, f.name) for f in fields(config) if f.init})
        if isinstance(parent, list):
            parent[attribute] = new
        else:
            setattr(parent, attribute, new)


# torchtitan's modules do not accept new parameters after they are built.
def declare(module: Any, initial: Mapping[str, Callable[..., Any]], like: Mapping[str, str]) -> None:
    """Declare parameters that were added to a built torchtitan module.

    `initial` has their initializers, and `like` the existing parameter whose sharding each of them shares.
    """
    module._param_init = {**module._param_init, **initial}
    if module._sharding_config is not None:
        states = module._sharding_config.state_shardings
        shardings = {name: states[other] for name, other in like.items()}
        module._sharding_config = replace(module._sharding_config, state_shardings=states | shardings)


# torchtitan has no setting for the number of multiprocessors that DeepEP uses.
def set_deepep_sms(count: int) -> None:
    from torchtitan.distributed.deepep import deepep

    _replace(deepep, "_resolve_dispatch_num_sms", lambda *_: count)


def forget_deepep_handles() -> None:
    """Drop the handles of dispatches that were not combined. DeepEP must be installed."""
    # A forward pass combines before the next dispatch. But the recomputation for a backward pass stops at the last
    # tensor that it needs, before the layer combines, and torchtitan would keep the handle: megabytes of GPU memory per
    # layer and micro batch. The backward pass itself holds the handles that it needs.
    from torchtitan.distributed.deepep import deepep

    deepep._handle_cache.clear()


def replace_modules(model_config: Any) -> None:
    """Make a model config build AnyDtypeExperts and, on CPUs, DenseAttention instead of torchtitan's modules."""
    swap(model_config, GroupedExperts, AnyDtypeExperts)
    if ON_CPU:
        swap(model_config, titan_attention.FlexAttention, DenseAttention)


# gloo lacks the pre-multiplied sum that FSDP uses for gradient scaling.
def _sum_gradients(model: torch.nn.Module) -> None:
    _disable_division(model)
    for module in model.modules():
        if isinstance(module, titan_fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


# torchtitan's MoE state dict adapter cannot read placements of a mesh with a replicated dimension (HSDP).
def _expert_range(
    self: MoEStateDictAdapter, dim: int, dim_size: int, dtensor_placements: tuple[Any, ...], device_mesh: Any
) -> tuple[int, int]:
    """Return the experts on this rank by torchtitan's rule, without replicated mesh dimensions, which split nothing."""
    pairs = zip(device_mesh.mesh_dim_names, dtensor_placements, strict=True)
    sharded = [(name, placement) for name, placement in pairs if not isinstance(placement, Replicate)]
    if not sharded:
        return 0, dim_size
    names = tuple(name for name, _ in sharded)
    placements = tuple(placement for _, placement in sharded)
    return _stock_expert_range(self, dim, dim_size, placements, device_mesh[names])


def _apply_fsdp(model: torch.nn.Module, dp_mesh: Any, **options: Any) -> None:
    dtype = options["param_dtype"]
    if one_rank.replaces_fsdp(model, dp_mesh, dtype, options["cpu_offload"]):
        one_rank.install(model, dp_mesh, dtype)
    else:
        _stock_apply_fsdp(model, dp_mesh, **options)


_stock_apply_fsdp = _replace(titan_fsdp, "apply_fsdp_to_decoder", _apply_fsdp)
_replace(titan_fsdp, "fully_shard", expert_fsdp.fully_shard)


# torch.compile assumes that varlen attention's outputs have the head size of queries, not that of values (MLA).
def _varlen_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return fake outputs of varlen attention with the head size of values."""
    out, lse, state = _stock_varlen_shapes(query, key, value, *others, **options)
    if value.shape[-1] != query.shape[-1]:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, lse, state


_stock_varlen_shapes = _replace(torch_varlen, "_varlen_attn_fake", _varlen_shapes)
torch_varlen._varlen_attn.register_fake(_varlen_shapes)
_stock_expert_range = _replace(MoEStateDictAdapter, "_caculate_indices_from_placements", _expert_range)
if ON_CPU:
    # Compiling `create_block_mask` costs more than it saves, and without a device no memory can be pinned.
    _replace(titan_attention, "_compiled_create_block_mask", create_block_mask)
    _replace(titan_fsdp, "CPUOffloadPolicy", partial(CPUOffloadPolicy, pin_memory=False))
    _disable_division = _replace(titan_fsdp, "disable_fsdp_gradient_division", _sum_gradients)
