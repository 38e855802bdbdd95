"""Checks of a layout's ranks: every tensor is stored, sent once, and as large as the planner predicts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from benchmarks.support.meta_rank import Box, Rank, boxes, covers, local_bytes
from primeslurm.models.shape import ModelShape
from primeslurm.plan.estimates.estimate import trainer_layout
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.trainer_memory import STATE_BYTES, trained_parameters
from primeslurm.recipe import Recipe
from primeslurm.wire.weight_transfer.catalogue import Catalogue, outgoing
from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE

# Size, ranks and placements of a tensor.
Layout = tuple[Any, ...]


class Share(NamedTuple):
    """Results of one rank."""

    rank: int
    faults: list[str]
    weights: int
    gradients: int
    optimizer: int
    """Bytes of optimizer state."""
    saved: int
    """Number of tensors that it writes to a checkpoint."""
    catalogue: Catalogue
    """Tensors of a policy that it sends."""
    expected: frozenset[str]
    """All tensors that must be sent."""
    seconds: float
    """CPU time [s]."""

    @property
    def sent(self) -> int:
        """Bytes of a policy that it sends to an engine that holds everything."""
        return sum(info.bytes for layer in self.catalogue for info in layer)


def share_of(rank: Rank) -> Share:
    """Check one rank by itself."""
    sent = Counter(names(rank.catalogue))
    faults = [*_both_ways(rank), *_saved(rank)]
    faults += [f"{name} is sent, and no tensor of the checkpoint" for name in sent.keys() - rank.policy.hf_names]
    states = rank.weights, rank.gradients, rank.optimizer
    names_of_all = frozenset(rank.policy.hf_names)
    return Share(
        rank.world.rank, faults, *states, len(rank.plan.items), rank.catalogue, names_of_all, time.process_time()
    )


def together(shares: Sequence[Share], engine_ranks: int) -> Iterator[str]:
    """Return the problems of all ranks together.

    `engine_ranks` is the number of receivers over which an engine's experts are distributed.
    """
    expected = shares[0].expected
    sent = Counter(name for share in shares for name in names(share.catalogue))
    yield from (f"{name} is sent {sent[name]} times" for name in expected if sent[name] != 1)
    experts = sorted({e for share in shares for layer in share.catalogue for info in layer for e in info.experts})
    each = len(experts) // engine_ranks
    for receiver in range(engine_ranks if each else 1):
        held = frozenset(experts[receiver * each : (receiver + 1) * each]) if each else None
        yield from _received(shares, held, expected)


def names(catalogue: Catalogue) -> Iterator[str]:
    """Return the names of all tensors of a catalogue, without scales."""
    for layer in catalogue:
        for info in layer:
            if not info.name.endswith(FP8_SCALE):
                yield from (info.name.format(expert) for expert in info.experts) if info.experts else (info.name,)


def predicted(recipe: Recipe, shape: ModelShape, size: int) -> dict[str, float]:
    """Return the planner's prediction of one rank's states, wherever they are [bytes]."""
    layout = trainer_layout(recipe, size, shape)
    trained = trained_parameters(shape, layout.lora_parameters, layout.frozen_vision)
    each = {"weights": 4 * count(shape).total, "gradients": 4 * trained}
    each["optimizer"] = STATE_BYTES[recipe.trainer.optimizer.type] * trained
    return {name: total / layout.shard for name, total in each.items()}


def apart(share: Share, expected: Mapping[str, float]) -> dict[str, float]:
    """Return the relative difference between a rank's bytes and the expected ones."""
    return {name: getattr(share, name) / value - 1 for name, value in expected.items()}


def _both_ways(rank: Rank) -> Iterator[str]:
    ours = rank.policy.weights()
    yield from (f"{name} has no way back" for name in ours.keys() ^ rank.back.keys())
    for name in ours.keys() & rank.back.keys():
        there, again = _place(ours[name]), _place(rank.back[name])
        if not _gathered(rank.back[name], ours[name]) and there != again:
            yield f"{name} was {there}, and comes back as {again}"
    yield from (f"{name} is no tensor of the checkpoint" for name in rank.named.keys() - rank.policy.hf_names)
    local = sum(local_bytes(t) for t in ours.values())
    named = sum(local_bytes(t) for t in rank.named.values())
    if named < local:
        yield f"{local - named} bytes have no name in the checkpoint"


def _gathered(back: Any, ours: Any) -> bool:
    """Return whether a tensor comes back larger than it was, because loading takes the rank's shard from it."""
    return isinstance(back, DTensor) and back.shape == ours.shape and local_bytes(back) > local_bytes(ours)


def _place(tensor: Any) -> Layout:
    if not isinstance(tensor, DTensor):
        return (tuple(tensor.shape),)
    return tuple(tensor.shape), _ranks(tensor), tensor.placements, tuple(tensor.to_local().shape)


def _ranks(tensor: Any) -> tuple[Any, ...]:
    return tensor.device_mesh.mesh_dim_names, tuple(tensor.device_mesh.mesh.shape)


def _saved(rank: Rank) -> Iterator[str]:
    """Return the problems of a checkpoint: all shards of a tensor must cover it, and this rank's must be planned."""
    planned: dict[str, list[Box]] = {}
    known: dict[Layout, list[Box]] = {}
    for item in rank.plan.items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            box = tuple((o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            planned.setdefault(item.index.fqn, []).append(box)
    for name, tensor in rank.state.items():
        if not isinstance(tensor, DTensor):
            continue
        layout = (tuple(tensor.shape), _ranks(tensor), tensor.placements)
        if layout not in known:
            known[layout] = boxes(tensor)
            if not covers(tensor.shape, known[layout]):
                yield f"{name}: what ranks save is not all of it, {tensor.placements} of {tuple(tensor.shape)}"
        mine = planned.get(name, [])
        if any(box not in known[layout] for box in mine if math.prod(b - a for a, b in box)):
            yield f"{name}: {mine} is no rank's part of it"
        if sum(math.prod(b - a for a, b in box) for box in mine) != tensor.to_local().numel():
            yield f"{name}: {mine} is not what the rank has, {tuple(tensor.to_local().shape)}"


def _received(shares: Iterable[Share], held: frozenset[int] | None, expected: Collection[str]) -> Iterator[str]:
    """Return the tensors that a receiver with some of the experts lacks."""
    found: set[str] = set()
    for share in shares:
        for layer in share.catalogue:
            for message in outgoing(layer, share.rank, held):
                for piece in message:
                    found.update(map(piece.whole.name.format, piece.experts) if piece.rows else [piece.whole.name])
    others = {name for name in expected if held is not None and _expert(name) not in (None, *held)}
    yield from (f"{name} reaches no engine that holds experts {held}" for name in expected - others - found)


def _expert(name: str) -> int | None:
    _, mark, rest = name.partition(".experts.")
    number = rest.partition(".")[0]
    return int(number) if mark and number.isdigit() else None
