"""Export of the policy in Hugging Face format: the tensors, and which rank exports each.

The state dict adapter returns a rank's own experts as local tensors, which are exported without a gather. Every other
tensor is gathered by the ranks that shard it, and these take turns as its exporter.

An `Encoding` sets the format of exported tensors. FP8 is the format of Hugging Face's FP8 checkpoints: `weight` in
e4m3, and `weight_scale_inv` with one float32 per block of 128 x 128. It takes half the bytes of bfloat16, and
quantizing it again in the same blocks changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from primeslurm.base.model_files import locate
from primeslurm.nn.kernels.fp8.blocks import BLOCK, BLOCKS, quantize
from primeslurm.recipe import Recipe
from primeslurm.records.heartbeats import liveness
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weights.tensor_files import TensorFiles
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE, in_fp8

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name is the layer


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor in Hugging Face format that this rank exports or helps to gather."""

    name: str
    is_exporter: bool  # Whether this rank exports the tensor. Exactly one rank does.
    sharded: torch.Tensor  # The tensor, possibly distributed. Its shape and dtype are those of the whole tensor.

    def whole(self) -> torch.Tensor:
        """Gather the whole tensor. A collective of the ranks that shard it, in the order of `parts`."""
        return lora.whole(self.sharded)


def parts(policy: PolicyModel, dtype: torch.dtype, world: World) -> Iterator[list[ExportedTensor]]:
    """Yield the tensors that this rank exports or helps to gather, by layer. Those outside of layers come first."""
    turns = _Turns(world, policy.dims)
    beside = [
        ExportedTensor(name, True, cast(name, t.to(policy.device), dtype)) for name, t in policy.unchanged.items()
    ]
    for adapter, state in ((part.adapter, state) for part in policy.parts for state in _layers(part, dtype)):
        sharded = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
        everywhere = {name: tensor for name, tensor in state.items() if name not in sharded}
        layer = [ExportedTensor(name, turns.owns(tensor), tensor) for name, tensor in adapter.to_hf(sharded).items()]
        layer += [ExportedTensor(name, turns.takes(), tensor) for name, tensor in adapter.to_hf(everywhere).items()]
        # Clones, because a file cannot hold two tensors with the same memory.
        layer += [
            ExportedTensor(policy.copies[each.name], each.is_exporter, each.sharded.clone())
            for each in layer
            if each.name in policy.copies
        ]
        liveness().heartbeat()
        yield layer + beside
        beside = []


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group the names of a state dict by layer. Names outside of layers come first."""
    layers: dict[int, list[str]] = {}
    for name in names:
        match = _LAYER.search(name)
        layers.setdefault(int(match[1]) if match else -1, []).append(name)
    return [layers[layer] for layer in sorted(layers)]


class _Turns:
    """Assigns tensors to exporting ranks in turn. Ranks that share tensors have the same order, so they agree."""

    def __init__(self, world: World, dims: Any) -> None:
        self._world = world
        replicas = dims.get_optional_mesh("dp_replicate")
        self._first_replica = replicas is None or replicas.get_local_rank() == 0
        self._turns: Counter[tuple[int, ...]] = Counter()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank exports `tensor`, which is a local expert or a sharded tensor."""
        if not isinstance(tensor, DTensor):
            return self._first_replica  # an expert of this rank: other replicas have the same
        return self._next(tuple(tensor.device_mesh.mesh.flatten().tolist()))

    def takes(self) -> bool:
        """Return whether this rank exports the next tensor of those that every rank has whole."""
        return self._next(tuple(range(self._world.size)))

    def _next(self, ranks: tuple[int, ...]) -> bool:
        owner = ranks[self._turns[ranks] % len(ranks)]
        self._turns[ranks] += 1
        return owner == self._world.rank


def _layers(policy: PolicyModel, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the policy's state dict by layer, on its device and in `dtype`."""
    everything = policy.model.state_dict()
    for names in by_layer(everything):
        state = {name: everything[name] for name in names}
        if policy.lora is None:
            state = {name: _local_if_whole(tensor) for name, tensor in state.items()}
        # Offloaded weights are moved to the device, because gathering is faster there.
        state = {name: tensor.to(policy.device) for name, tensor in state.items()}
        if policy.lora is not None:
            state = lora.merge(state, policy.lora)
        yield {name: cast(name, tensor, dtype) for name, tensor in state.items()}


def _local_if_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap a tensor that one rank has all of, because each operation on a DTensor costs 0.1 ms. Not for experts."""
    is_whole = isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1 and tensor.ndim < 3
    return tensor.to_local() if is_whole else tensor  # type: ignore[attr-defined]


# Suffixes of tensors that keep their dtype. Rounding a router's bias would change the experts that it selects.
_EXACT = ("expert_bias_E", "expert_bias", "e_score_correction_bias")


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if name.endswith(_EXACT) else tensor.to(dtype)


@dataclass(frozen=True)
class Encoding:
    """Dtype of exported tensors, and which of them are quantized to FP8."""

    dtype: torch.dtype  # dtype of all tensors that are not in FP8
    fp8: bool = False  # whether projections and experts are exported in FP8
    stored: frozenset[str] = frozenset()
    """Weights that the engines' own checkpoint stores in FP8. If there are any, exactly these are exported in FP8. They
    are quantized from float32, so that unchanged weights equal those that the engines started with."""
    trained_in_fp8: bool = False
    """Whether the trainer multiplies in FP8. Then `stored` weights are quantized from `dtype`, as the trainer's
    products do, so that engines multiply by the same numbers."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def gathered(self) -> torch.dtype:
        """Dtype of gathered tensors, before encoding."""
        return torch.float32 if self.stored and not self.trained_in_fp8 else self.dtype

    def encode(self, name: str, tensor: torch.Tensor, experts: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Encode a tensor, or a stack of experts. The name of a stack has `{}` in place of the expert's number."""
        # All experts of a layer have the same format, because engines store them in one tensor.
        example = (name.format(experts[0]), tensor[0]) if experts else (name, tensor)
        if not self._in_fp8(*example):
            return {name: cast(name, tensor, self.dtype)}
        quantised = quantize(tensor.to(self.gathered), BLOCKS)
        return {name: quantised.data, name + FP8_SCALE: quantised.scales}

    def quantization(self, names: set[str]) -> dict[str, Any] | None:
        """Return the `quantization_config` of a model with tensors `names`, for config.json. None if not quantized."""
        if not (self.fp8 or self.stored):
            return None
        weights = {name for name in names if name.endswith(".weight")}
        unquantized = sorted(name.removesuffix(".weight") for name in weights if name + FP8_SCALE not in names)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": unquantized,
        }

    def _in_fp8(self, name: str, tensor: torch.Tensor) -> bool:
        if self.stored:
            return name in self.stored
        return self.fp8 and tensor.ndim == 2 and in_fp8(name)


def stored_by_engines(recipe: Recipe, by_policy: frozenset[str], world: World) -> frozenset[str]:
    """Return the weights that the engines' checkpoint stores in FP8. A collective if that is not the policy's."""
    if recipe.inference.model is None:
        return by_policy
    return TensorFiles.shared(locate(recipe.inference.model), world).fp8_names()


def published(recipe: Recipe, stored: frozenset[str]) -> Encoding:
    """Return the encoding of a run's policies. For RL it is that of the engines, whose files store `stored` in FP8."""
    dtype = getattr(torch, recipe.model.dtype)
    if recipe.task == "sft":
        return Encoding(dtype)
    return Encoding(dtype, recipe.inference.quantization == "fp8", stored, recipe.trainer.fp8)
