"""LoRA adapters: a frozen weight W computes as W + scale * B A^T, and only A and B are trained.

An adapter consists of two parameters of the weight's module: `<weight>_lora_a` [..., in, rank] and `<weight>_lora_b`
[..., out, rank]. The rank is the last dimension, so that FSDP can shard the dimension before it over any number of
ranks. Each expert has its own pair, on the ranks that hold the expert.

Rows of a batch can instead have different adapters (`RowAdapters`). The frozen product is then still one product.
"""

from __future__ import annotations

import difflib
import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import RoutedExperts

from primeslurm.nn import compat
from primeslurm.nn.layers.sparse_attention import SparseAttention
from primeslurm.recipe.sections.trainer import Lora
from primeslurm.trainer.base.model_draft import ModelDraft

A, B = "_lora_a", "_lora_b"
EXPERTS = "experts"
EXPERT_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
# Engines do not support adapters of these layers, or the model does not train them.
_NEVER = frozenset({"lm_head", "gate", "shared_expert_gate", "wq_b", "wk", "weights_proj"})


@dataclass
class RowOwners:
    """Which LoRA adapter each row of a batch uses."""

    index: torch.Tensor | None = None
    """Index of each row's adapter [rows], ascending. None: there is only one adapter."""
    adapters: int = 1
    even: bool = True
    """True if all adapters have the same number of rows."""


@dataclass(frozen=True)
class RowAdapters:
    """Adapters of one weight, used instead of the weight's own.

    `a` is [..., adapters, in, rank] and `b` [..., adapters, out, rank], both float32. Shorter ranks are padded with
    zeros, and `b` includes the scale. Experts have a dimension in front.
    """

    a: torch.Tensor
    b: torch.Tensor
    owners: RowOwners

    def change(self, x: torch.Tensor) -> torch.Tensor:
        """Return the change of a linear layer's output for rows [rows, length, in]."""
        a, b = self.a.to(x.dtype), self.b.to(x.dtype)
        if not self.owners.even and self.owners.index is not None:
            # The batched product, one kernel for any number of adapters, takes equal numbers of rows. Therefore, each
            # row gets a copy of its adapter.
            a, b = (pairs.index_select(0, self.owners.index) for pairs in (a, b))
        return ((x.reshape(len(a), -1, x.shape[-1]) @ a) @ b.mT).view(*x.shape[:-1], -1)

    def change_of_experts(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return the change of the experts' output for tokens [tokens, in], sorted by expert, then by adapter.

        `offsets` [experts * adapters] are the ends of their tokens.
        """
        a, b = (pairs.to(x.dtype).flatten(0, 1) for pairs in (self.a, self.b))
        return _grouped(x, a, b, offsets)


class _RowDispatcher:
    """Wraps a token dispatcher, so that the tokens of each expert are also sorted by LoRA adapter."""

    def __init__(self, dispatcher: Any, experts: Any, owners: RowOwners) -> None:
        self._dispatcher, self._experts, self._owners = dispatcher, experts, owners
        self._count = dispatcher.num_experts

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Send tokens [tokens, in] to the experts `ids` [tokens, top_k]. Set the experts' `adapter_ends`."""
        adapters, index = max(1, self._owners.adapters), self._owners.index
        if index is not None:
            # To the dispatcher, each pair of an expert and an adapter is an expert, wherever its tokens come from.
            ids = ids * adapters + index[:, None].expand(-1, len(x) // len(index)).reshape(-1, 1)
            # Unlike `bincount`, this does not wait for a GPU.
            counts = ids.new_zeros(len(counts) * adapters).scatter_add_(
                0, ids.flatten(), torch.ones_like(ids.flatten())
            )
        self._dispatcher.num_experts = self._count * adapters
        rows, counts, state = self._dispatcher.dispatch(x, scores, ids, counts)
        self._experts.adapter_ends = counts.cumsum(0, dtype=torch.int32)
        return rows, counts if index is None else counts.view(-1, adapters).sum(1), state

    def combine(self, *arguments: Any) -> torch.Tensor:
        combined: torch.Tensor = self._dispatcher.combine(*arguments)
        return combined


def adapt_rows(model: Any, owners: RowOwners) -> None:
    """Make each module of a LoRA model add its `row_adapters` (by weight name) instead of its own adapters."""
    for module in model.modules():
        if hasattr(module, "row_adapters"):
            module.row_adapters = {}
        elif isinstance(module, RoutedExperts) and hasattr(module.inner_experts, "row_adapters"):
            module.token_dispatcher = _RowDispatcher(module.token_dispatcher, module.inner_experts, owners)


def convert(draft: ModelDraft) -> None:
    """Add adapters to the layers in `trainer.lora.targets` (None: all possible ones), and freeze everything else."""
    lora, model = draft.recipe.trainer.lora, draft.model
    if lora is None:
        return
    targets = _targets(model, draft.adapter)
    valid = sorted(set(targets.values()))
    wanted = set(valid if lora.targets is None else lora.targets)
    if unknown := sorted(wanted - set(valid)):
        raise ValueError("; ".join(_unknown(name, valid) for name in unknown))
    for name, target in targets.items():
        if target in wanted:
            _attach(model.get_submodule(name), lora, f"{draft.recipe.seed}:{name}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def is_experts(name: str) -> bool:
    """Return whether the adapter parameter `name` belongs to experts, and so stacks one matrix per expert."""
    return name.endswith(tuple(weight + suffix for weight in EXPERT_WEIGHTS for suffix in (A, B)))


def base_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}


def merge(tensors: Mapping[str, torch.Tensor], lora: Lora) -> dict[str, torch.Tensor]:
    """Return the weights among `tensors` with their adapters added. A collective, which gathers the adapters."""
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name + A in tensors:
            merged[name] = _add(tensor, tensors[name + A], tensors[name + B], lora.alpha / lora.rank)
        elif not is_adapter(name):
            merged[name] = tensor
    return merged


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _add(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    a, b = whole(a), whole(b)
    if not isinstance(weight, DTensor):
        return weight + scale * (b @ a.mT)
    *stack, rows, columns = compat.local_region(weight)
    local = weight.to_local() + scale * (b[(*stack, rows)] @ a[(*stack, columns)].mT)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _targets(model: nn.Module, state_dict_adapter: Any) -> dict[str, str]:
    """Map each module that supports an adapter to its target name in recipes."""
    targets: dict[str, str] = {}
    # Sparse attention reads the weight of this layer and never calls it.
    absorbed = {f"{name}.wkv_b" for name, module in model.named_modules() if isinstance(module, SparseAttention)}
    for name, module in model.named_modules():
        if isinstance(module, compat.AnyDtypeExperts):
            targets[name] = EXPERTS
        elif isinstance(module, Linear) and name not in absorbed:
            for hf_name in state_dict_adapter.to_hf({f"{name}.weight": module.weight}):
                target = hf_name.removesuffix(".weight").rsplit(".")[-1]
                if target not in _NEVER:
                    targets[name] = target
    return targets


def _unknown(name: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"trainer.lora.targets = {name}: this model has no layers of that name ({hint}valid: {', '.join(valid)})"


def _attach(module: Linear | compat.AnyDtypeExperts, lora: Lora, seed: str) -> None:
    experts = isinstance(module, compat.AnyDtypeExperts)
    initial: dict[str, Callable[..., Any]] = {}
    like: dict[str, str] = {}
    for weight in EXPERT_WEIGHTS if experts else ("weight",):
        parameter = getattr(module, weight)
        *stack, rows, columns = parameter.shape
        for suffix, size in ((A, columns), (B, rows)):
            module.register_parameter(weight + suffix, nn.Parameter(parameter.new_empty(*stack, size, lora.rank)))
            like[weight + suffix] = weight
        initial[weight + A] = partial(draw, seed=f"{seed}.{weight}")
        initial[weight + B] = nn.init.zeros_
    compat.declare(module, initial, like)
    module.scale = lora.alpha / lora.rank
    module.row_adapters = None  # or RowAdapters by weight, which replace the module's own adapters
    base: Any = type(module)
    module.__class__ = _adapted_experts(base) if experts else _adapted_linear(base)


@functools.cache
def _adapted_linear(base: Any) -> Any:
    class LoraLinear(base):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if self.row_adapters is not None:
                out = super().forward(input)
                adapters = self.row_adapters.get("weight")
                return out if adapters is None else out + adapters.change(input)
            change = (input @ self.weight_lora_a) @ self.weight_lora_b.mT
            return super().forward(input) + change * self.scale

    return LoraLinear


@functools.cache
def _adapted_experts(base: Any) -> Any:
    class LoraExperts(base):
        def project(self, name: str, x_RD: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            if self.row_adapters is not None:
                out = super().project(name, x_RD, offsets)
                adapters = self.row_adapters.get(name)
                return out if adapters is None else out + adapters.change_of_experts(x_RD, self.adapter_ends)
            a, b = (self.local(name + suffix, x_RD.dtype) for suffix in (A, B))
            return super().project(name, x_RD, offsets) + _grouped(x_RD, a, b, offsets) * self.scale

    return LoraExperts


def _grouped(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(F.grouped_mm(x, a, offs=offsets), b.mT, offs=offsets)


def draw(parameter: torch.Tensor, seed: str) -> None:
    """Initialize an adapter's A uniformly within 1/sqrt(in). Values depend on `seed` only, not on the sharding."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    bound = parameter.shape[-2] ** -0.5
    values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(values[compat.local_region(parameter)])
    else:
        parameter.copy_(values)
