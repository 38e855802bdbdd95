"""Every place where we reach into torchtitan or torch beyond their public interfaces.

The package imports this module before any torchtitan module is. Each patch checks that what it replaces is still there;
a version other than the one it was written for is refused, because a patch that no longer fits fails silently.

On machines without CUDA:
- torchtitan picks its device when it is imported, and would fall back to "cuda"
- flex attention has no backward pass, varlen attention no kernel: `DenseAttention` computes the same mask densely
- there is no Triton, which torchtitan imports for an expert-parallel backend that we do not use
- gloo lacks the pre-multiplied sum that FSDP uses for gradient scaling
- compiling `create_block_mask` costs more than it saves
- FSDP pins the host memory of offloaded parameters, which needs a device
On all machines:
- torchtitan's MoE state dict adapter cannot read placements of a mesh with a replicated dimension (HSDP)
- torchtitan splits experts that do not come out even among ranks: `expert_shards`
- torchtitan's grouped experts cast everything to bfloat16, whatever the compute dtype
- torchtitan's modules take no further parameters once they are built: `declare`
- torch has no public way to ask which part of a distributed tensor a rank holds: `local_region`
- nor to keep a rank's part of one on another device than its mesh's: `with_local`
- torch's collectives that autograd knows, and that activation checkpointing may save, have no public name yet
- torch tells its compiler that what varlen attention puts out is as wide as queries: of latent attention, as values
With CUDA:
- torchtitan lets DeepEP guess how many multiprocessors to use, and has no setting for it
- torchtitan keeps DeepEP's handle of every layer that is computed anew for its backward pass: `forget_deepep_handles`
- torchtitan asks for FlashAttention 3 or 4 by the GPU's generation, whether that package is installed or not:
  `flash_attention.best`
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
    """Set an attribute that must already exist; returns the old value."""
    if not hasattr(owner, name):
        where = owner.__name__ if isinstance(owner, ModuleType | type) else repr(owner)
        raise RuntimeError(f"{where}.{name} is gone: this version of torch or torchtitan is not supported")
    old = getattr(owner, name)
    setattr(owner, name, value)
    return old


def _without_triton(name: str) -> Any:
    """Stands for any function of a Triton kernel module: importing it works, calling it does not."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{name} needs Triton, which is not installed")

    return missing


if version("torchtitan") != SUPPORTED:
    raise RuntimeError(f"torchtitan {version('torchtitan')} is installed, but only {SUPPORTED} is supported")
if ON_CPU:
    _replace(torch._utils, "_get_available_device_type", lambda: "cpu")
    if importlib.util.find_spec("triton") is None:
        _kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
        _kernels.__getattr__ = _without_triton  # type: ignore[method-assign]
        sys.modules[_kernels.__name__] = _kernels

import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402
import torchtitan.models.common.attention as titan_attention  # noqa: E402
import torchtitan.tools.utils as titan_utils  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.utils import MoEStateDictAdapter  # noqa: E402

from primeslurm.nn import expert_fsdp  # noqa: E402
from primeslurm.nn.kernels import flash_attention, host_value_cache  # noqa: E402

if not ON_CPU:
    _best = partial(flash_attention.best, titan_utils.get_cuda_flash_attention_impl, register_flash_attention_fa4)
    _replace(titan_utils, "get_cuda_flash_attention_impl", _best)


def all_gather(tensor: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Gather every rank's tensor, concatenated along `dim`. Gradients are summed, and scattered back."""
    parts = _waited(collectives.all_gather_single(tensor.contiguous(), 0, group)).unflatten(0, (group.size(), -1))
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def all_to_all(
    tensor: torch.Tensor,
    group: ProcessGroup | GroupName,
    receive: list[int] | None = None,
    send: list[int] | None = None,
) -> torch.Tensor:
    """Send each rank its part of the first dimension, and concatenate what comes from each, in the order of ranks.

    Args:
        tensor: [sum(send), ...].
        group: the ranks, or the name of their group.
        receive: rows that come from each; equal parts if neither is given.
        send: rows for each.
    """
    return _waited(collectives.all_to_all_single(tensor, receive, send, group))


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    # What follows may be compiled, and then cannot take a tensor that is still on its way. Only what a collective
    # returns may wait like this: autograd loses what was computed from it.
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def dense(mask_mod: Callable[..., torch.Tensor], rows: int, queries: int, keys: int, on: torch.device) -> torch.Tensor:
    """Return which queries see which keys, [rows, 1, queries, keys], for all heads alike.

    The rule is asked once, by indices that are broadcast. torch's `create_mask` maps it over single ones (`vmap`): ten
    times as long on a CPU, a seventh of a small model's step.
    """
    row, query, key = (torch.arange(size, device=on) for size in (rows, queries, keys))
    seen = mask_mod(row.view(-1, 1, 1, 1), row.new_zeros(()), query.view(-1, 1), key)
    return seen.expand(rows, 1, queries, keys)


class DenseAttention(titan_attention.FlexAttention):
    """The attention of FlexAttention by a dense mask and SDPA: quadratic memory, runs anywhere."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_attention.FlexAttention.Config):
        """As FlexAttention's."""

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
        """Map queries, keys and values [batch, length, heads, head_dim] to outputs of the queries' shape.

        `out_transform` gets outputs and the log of each query's sum of exponentials, [batch, length, heads].
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
    """GroupedExperts that compute in the dtype of their input instead of always in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As GroupedExperts'."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Run tokens sorted by expert, [rows, dim], through their experts' SwiGLU."""
        offsets = host_value_cache.ends(num_tokens_per_expert_E)
        gate = self.project("w1_EFD", x_RD, offsets)
        up = self.project("w3_EFD", x_RD, offsets)
        return self.project("w2_EDF", F.silu(gate) * up, offsets)

    def project(self, name: str, x_RD: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Multiply rows [rows, in] that are sorted by expert by their expert's matrix `name` [experts, out, in].

        Experts end at `offsets` [experts]. Returns [rows, out].
        """
        return self._grouped_mm(A=x_RD, B_t=self.local(name, x_RD.dtype).transpose(-2, -1), offs=offsets)

    def local(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's experts' part of parameter `name`, in a dtype."""
        parameter = getattr(self, name)
        return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).to(dtype)


def local_region(tensor: DTensor) -> tuple[slice, ...]:
    """Return which part of a distributed tensor this rank holds."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor like another one whose local part is `local`, on any device; or `local` alone."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local


def swap(
    model_config: Any, base: Any, replacement: Any, where: Callable[[str, Any], bool] = lambda name, config: True
) -> None:
    """Replace every `base.Config` below a model config by `replacement.Config` with the same values.

    `where` is asked with each one's module name and config.
    """
    for name, config, parent, attribute in list(model_config.traverse(base.Config)):
        if type(config) is not base.Config or not where(name, config):
            continue
        new = replacement.Config(**{f.name: getattr(config, f.name) for f in fields(config) if f.init})
        if isinstance(parent, list):
            parent[attribute] = new
        else:
            setattr(parent, attribute, new)


def declare(module: Any, initial: Mapping[str, Callable[..., Any]], like: Mapping[str, str]) -> None:
    """Tell torchtitan about parameters that were added to a built module.

    Args:
        module: what they were added to.
        initial: what initialises each of them.
        like: the parameter of the module whose place each of them shares.
    """
    module._param_init = {**module._param_init, **initial}
    if module._sharding_config is not None:
        states = module._sharding_config.state_shardings
        places = {name: states[other] for name, other in like.items()}
        module._sharding_config = replace(module._sharding_config, state_shardings=states | places)


def set_deepep_sms(count: int) -> None:
    """Give DeepEP's kernels this many streaming multiprocessors. DeepEP must be installed."""
    from torchtitan.distributed.deepep import deepep

    _replace(deepep, "_resolve_dispatch_num_sms", lambda *_: count)


def forget_deepep_handles() -> None:
    """Let go of what was dispatched and is not combined. DeepEP must be installed.

    Forward passes combine before they dispatch again. What is computed anew for a backward pass stops at the last
    tensor that this needs, which comes before the layer combines, and nobody would take the handle: megabytes of GPU
    memory for each layer and micro batch. The backward pass itself holds the handles that it needs.
    """
    from torchtitan.distributed.deepep import deepep

    deepep._handle_cache.clear()


def replace_modules(model_config: Any) -> None:
    """Replace modules of a model config by those of this file, where this machine needs them."""
    swap(model_config, GroupedExperts, AnyDtypeExperts)
    if ON_CPU:
        swap(model_config, titan_attention.FlexAttention, DenseAttention)


def _sum_gradients(model: torch.nn.Module) -> None:
    _disable_division(model)
    for module in model.modules():
        if isinstance(module, titan_fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _expert_range(
    self: MoEStateDictAdapter, dim: int, dim_size: int, dtensor_placements: tuple[Any, ...], device_mesh: Any
) -> tuple[int, int]:
    """The adapter's own rule, without the mesh dimensions that replicate: they do not split experts."""
    pairs = zip(device_mesh.mesh_dim_names, dtensor_placements, strict=True)
    sharded = [(name, placement) for name, placement in pairs if not isinstance(placement, Replicate)]
    if not sharded:
        return 0, dim_size
    names = tuple(name for name, _ in sharded)
    placements = tuple(placement for _, placement in sharded)
    return _stock_expert_range(self, dim, dim_size, placements, device_mesh[names])


_replace(titan_fsdp, "fully_shard", expert_fsdp.fully_shard)


def _varlen_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tell the compiler what varlen attention puts out: heads as wide as values."""
    out, lse, state = _stock_varlen_shapes(query, key, value, *others, **options)
    if value.shape[-1] != query.shape[-1]:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, lse, state


_stock_varlen_shapes = _replace(torch_varlen, "_varlen_attn_fake", _varlen_shapes)
torch_varlen._varlen_attn.register_fake(_varlen_shapes)
_stock_expert_range = _replace(MoEStateDictAdapter, "_caculate_indices_from_placements", _expert_range)
if ON_CPU:
    _replace(titan_attention, "_compiled_create_block_mask", create_block_mask)
    _replace(titan_fsdp, "CPUOffloadPolicy", partial(CPUOffloadPolicy, pin_memory=False))
    _disable_division = _replace(titan_fsdp, "disable_fsdp_gradient_division", _sum_gradients)
