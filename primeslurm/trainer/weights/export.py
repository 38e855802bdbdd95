"""A policy in Hugging Face format: every tensor of it, and which rank hands it on.

Experts that a rank owns come out of the state dict adapter as that rank's own tensors: nobody gathers them. Every other
tensor is gathered by itself, by the ranks that hold its shards, who take turns in handing one on. An `Encoding` says in
which format tensors leave: FP8 is that of Hugging Face's FP8 checkpoints, `weight` in e4m3 and `weight_scale_inv`, one
float32 for each block of 128 x 128. It takes half the bytes of bfloat16, and quantising it again in the same blocks
changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from primeslurm.nn.kernels.fp8.blocks import BLOCK, BLOCKS, quantize
from primeslurm.recipe import Recipe
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE, in_fp8

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name is that of its layer


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor in Hugging Face format, as far as this rank has to do with it."""

    name: str
    mine: bool
    """Whether this rank hands it on. Over all ranks, one does."""
    sharded: torch.Tensor
    """Its shape and dtype are those of the whole."""

    def whole(self) -> torch.Tensor:
        """Gather the whole tensor (a collective of the ranks that have this part, in the order of parts)."""
        return lora.whole(self.sharded)


def parts(policy: PolicyModel, dtype: torch.dtype, world: World) -> Iterator[list[ExportedTensor]]:
    """Yield what this rank hands on or helps to gather, layer by layer; what belongs to no layer comes first."""
    turns = _Turns(world, policy.dims)
    beside = [
        ExportedTensor(name, True, cast(name, t.to(policy.device), dtype)) for name, t in policy.unchanged.items()
    ]
    for state in _layers(policy, dtype):
        sharded = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
        everywhere = {name: tensor for name, tensor in state.items() if name not in sharded}
        layer = [
            ExportedTensor(name, turns.owns(tensor), tensor) for name, tensor in policy.adapter.to_hf(sharded).items()
        ]
        layer += [
            ExportedTensor(name, turns.takes(), tensor) for name, tensor in policy.adapter.to_hf(everywhere).items()
        ]
        liveness().heartbeat()
        yield layer + beside
        beside = []


def export(policy: PolicyModel, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield whole tensors under Hugging Face names, one layer at a time, on every rank (a collective).

    The first dictionary holds what belongs to no layer. For looking at small models: each rank gathers whole layers,
    experts included.
    """
    for state in _layers(policy, dtype):
        yield policy.adapter.to_hf({name: lora.whole(tensor) for name, tensor in state.items()})


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group names of a state dict, those of a layer together; what belongs to no layer comes first."""
    layers: dict[int, list[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        layers.setdefault(int(match[1]) if match else -1, []).append(name)
    return [layers[layer] for layer in sorted(layers)]


class _Turns:
    """Whose turn it is to hand on a tensor. Ranks that share tensors have them in the same order, and so agree."""

    def __init__(self, world: World, dims: Any) -> None:
        self._world = world
        replicas = dims.get_optional_mesh("dp_replicate")
        self._first_replica = replicas is None or replicas.get_local_rank() == 0
        self._turns: Counter[tuple[int, ...]] = Counter()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say who hands on a tensor that came out of sharded ones: this rank's own, or still sharded."""
        if not isinstance(tensor, DTensor):
            return self._first_replica
        return self._next(tuple(tensor.device_mesh.mesh.flatten().tolist()))

    def takes(self) -> bool:
        """Say who hands on a tensor that every rank has."""
        return self._next(tuple(range(self._world.size)))

    def _next(self, ranks: tuple[int, ...]) -> bool:
        owner = ranks[self._turns[ranks] % len(ranks)]
        self._turns[ranks] += 1
        return owner == self._world.rank


def _layers(policy: PolicyModel, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """The policy's state dict on its device and in `dtype`, layer by layer; what belongs to no layer comes first."""
    everything = policy.model.state_dict()  # detached from autograd
    for names in by_layer(everything):
        # Offloaded masters visit the device: gathering is faster there.
        state = {name: everything[name].to(policy.device) for name in names}
        if policy.lora is not None:
            state = lora.merge(state, policy.lora)
        yield {name: cast(name, tensor, dtype) for name, tensor in state.items()}


_EXACT = ("expert_bias_E", "expert_bias", "e_score_correction_bias")
"""Keep their dtype: rounding a router's selection bias would change which experts it selects."""


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the dtype in which it leaves the trainer."""
    return tensor if name.endswith(_EXACT) else tensor.to(dtype)


@dataclass(frozen=True)
class Encoding:
    """What becomes of a tensor that leaves the trainer.

    Args:
        dtype: of all tensors, or with `fp8` of those that engines do not compute in FP8.
        fp8: projections and experts leave in FP8.
        stored: what engines' own checkpoint stores in FP8: exactly these weights leave in FP8, whatever `fp8` says.
            They are quantised from float32, so that what did not change is what engines began with.
        trained_in_fp8: the trainer's products quantise weights of `dtype`. `stored` ones are quantised from `dtype`,
            too, so that engines multiply by the same numbers.
    """

    dtype: torch.dtype
    fp8: bool = False
    stored: frozenset[str] = frozenset()
    trained_in_fp8: bool = False

    @property
    def dtype_name(self) -> str:
        """`dtype` as config.json names it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def gathered(self) -> torch.dtype:
        """What tensors have to be in before they are encoded."""
        return torch.float32 if self.stored and not self.trained_in_fp8 else self.dtype

    def encode(self, name: str, tensor: torch.Tensor, experts: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Encode a tensor, or a stack of experts under a name with `{}` for their number, as it leaves the trainer."""
        # A layer's experts are in one format: engines hold them so.
        alone = (name.format(experts[0]), tensor[0]) if experts else (name, tensor)
        if not self._in_fp8(*alone):
            return {name: cast(name, tensor, self.dtype)}
        quantised = quantize(tensor.to(self.gathered), BLOCKS)
        return {name: quantised.data, name + FP8_SCALE: quantised.scales}

    def quantization(self, names: set[str]) -> dict[str, Any] | None:
        """Return config.json's `quantization_config` of a model with tensors `names`, if there is one."""
        if not (self.fp8 or self.stored):
            return None
        weights = {name for name in names if name.endswith(".weight")}
        kept = sorted(name.removesuffix(".weight") for name in weights if name + FP8_SCALE not in names)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }

    def _in_fp8(self, name: str, tensor: torch.Tensor) -> bool:
        if self.stored:
            return name in self.stored
        return self.fp8 and tensor.ndim == 2 and in_fp8(name)


def published(recipe: Recipe, stored: frozenset[str]) -> Encoding:
    """Return the encoding of the policies of a run.

    Engines get what they compute in. Policies of SFT are not quantised.

    Args:
        recipe: of the run.
        stored: names of the weights that the model's checkpoint stores in FP8.
    """
    dtype = getattr(torch, recipe.model.dtype)
    if recipe.task == "sft":
        return Encoding(dtype)
    return Encoding(dtype, recipe.inference.quantization == "fp8", stored, recipe.trainer.fp8)
