"""A policy in Hugging Face format: every tensor of it, and which rank hands it on.

Experts that a rank owns come out of the state dict adapter as that rank's own tensors: nobody gathers them. Every other
tensor is gathered by itself, by the ranks that hold its shards, who take turns in handing one on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from primeslurm.records.beats import pulse
from primeslurm.trainer.assembly.policy_model import PolicyModel
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weights.encoding import cast

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name is that of its layer


@dataclass(frozen=True)
class Part:
    """One tensor in Hugging Face format, as far as this rank has to do with it."""

    name: str
    mine: bool
    """Whether this rank hands it on. Over all ranks, one does."""
    sharded: Any
    """Its shape and dtype are those of the whole."""

    def whole(self) -> torch.Tensor:
        """Gather the whole tensor (a collective of the ranks that have this part, in the order of parts)."""
        return lora.whole(self.sharded)


def parts(policy: PolicyModel, dtype: torch.dtype, world: World) -> Iterator[list[Part]]:
    """Yield what this rank hands on or helps to gather, layer by layer; what belongs to no layer comes first."""
    turns = _Turns(world, policy.dims)
    beside = [Part(name, True, cast(name, t.to(policy.device), dtype)) for name, t in policy.unchanged.items()]
    for state in _layers(policy, dtype):
        sharded = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
        everywhere = {name: tensor for name, tensor in state.items() if name not in sharded}
        layer = [Part(name, turns.owns(tensor), tensor) for name, tensor in policy.adapter.to_hf(sharded).items()]
        layer += [Part(name, turns.takes(), tensor) for name, tensor in policy.adapter.to_hf(everywhere).items()]
        pulse().beat()
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

    def owns(self, tensor: Any) -> bool:
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


def _layers(policy: PolicyModel, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The policy's state dict on its device and in `dtype`, layer by layer; what belongs to no layer comes first."""
    everything = policy.model.state_dict()  # detached from autograd
    for names in by_layer(everything):
        # Offloaded masters visit the device: gathering is faster there.
        state = {name: everything[name].to(policy.device) for name in names}
        if policy.lora is not None:
            state = lora.merge(state, policy.lora)
        yield {name: cast(name, tensor, dtype) for name, tensor in state.items()}
