"""A policy in Hugging Face format: every tensor of it, and which rank hands it on.

Experts that a rank owns come out of the state dict adapter as that rank's own tensors: nobody gathers them. Every other
tensor is gathered by itself, by the ranks that hold its shards, who take turns in handing one on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from primeslurm.trainer.parallel import Policy

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """One tensor in Hugging Face format, as far as this rank has to do with it."""

    name: str
    mine: bool
    """Whether this rank hands it on. Over all ranks, one does."""
    sharded: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.sharded.shape)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor (a collective of the ranks that have this part, in the order of parts)."""
        return _whole(self.sharded.to(dtype))


def parts(policy: Policy, rank: int) -> Iterator[list[Part]]:
    """What `rank` hands on or helps to gather, layer by layer; what belongs to no layer comes first."""
    turns: Counter[tuple[int, ...]] = Counter()
    for state in _layers(policy):
        yield [_part(name, tensor, rank, turns) for name, tensor in policy.adapter.to_hf(state).items()]


def export(policy: Policy, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Whole tensors under Hugging Face names, one layer at a time, on every rank (a collective).

    For looking at small models: each rank gathers whole layers, experts included.
    """
    for state in _layers(policy):
        yield policy.adapter.to_hf({name: _whole(tensor.to(dtype)) for name, tensor in state.items()})


def _layers(policy: Policy) -> Iterator[dict[str, Any]]:
    """The policy's state dict, detached from autograd, layer by layer; what belongs to no layer comes first."""
    layers: dict[int, dict[str, Any]] = {}
    for name, tensor in policy.model.state_dict().items():
        match = _LAYER.match(name)
        layers.setdefault(int(match[1]) if match else -1, {})[name] = tensor
    for layer in sorted(layers):
        yield layers[layer]


def _part(name: str, tensor: Any, rank: int, turns: Counter[tuple[int, ...]]) -> Part:
    if not isinstance(tensor, DTensor):
        return Part(name, True, tensor)
    # All ranks of a mesh have its tensors in the same order, so they agree on whose turn it is.
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    owner = ranks[turns[ranks] % len(ranks)]
    turns[ranks] += 1
    return Part(name, owner == rank, tensor)


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
