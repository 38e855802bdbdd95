"""One rank of a trainer of any size, on one CPU: the real assembly on the meta device, in a fake process group.

A fake group answers at once and transfers nothing, and meta tensors have shapes but no memory. Computed values are
meaningless, but the placement of all shards is real. DTensor caches meshes, so a process can be only one rank.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from primeslurm.models import model_builder
from primeslurm.models.catalog import CATALOG
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import assemble
from primeslurm.trainer.checkpoints import checkpoint
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.collective_sender import Sender
from primeslurm.trainer.weights.export import published
from primeslurm.wire.weight_transfer.catalogue import Catalogue

T = TypeVar("T")
META = torch.device("meta")
# Start and end of a box in each dimension.
Box = tuple[tuple[int, int], ...]


class Fake(World):
    """A rank that is alone, whatever the size of its world."""

    def collect(self, value: T) -> list[T]:
        return [value]


@dataclass(frozen=True)
class Rank:
    """The state of one rank."""

    world: Fake
    policy: PolicyModel
    train_step: TrainStep
    named: dict[str, Any]
    """Its tensors of the model, under Hugging Face names."""
    back: dict[str, Any]
    """The same tensors converted back to our names."""
    state: dict[str, Any]
    """Its training state."""
    plan: SavePlan
    """Its part of a checkpoint."""
    catalogue: Catalogue
    """Tensors of a policy that it sends."""

    @property
    def weights(self) -> int:
        """Bytes of its master weights and buffers."""
        return sum(local_bytes(t) for t in self.policy.model.state_dict().values())

    @property
    def gradients(self) -> int:
        """Bytes of its gradients."""
        return sum(local_bytes(p) for p in self.policy.model.parameters() if p.requires_grad)

    @property
    def optimizer(self) -> int:
        """Bytes of its optimizer state."""
        states = (state for optimizer in self.train_step.optimizer for state in optimizer.state.values())
        return sum(local_bytes(t) for state in states for t in state.values() if isinstance(t, torch.Tensor))

    @property
    def sent(self) -> int:
        """Bytes of a policy that it sends to an engine that holds everything."""
        return sum(info.bytes for layer in self.catalogue for info in layer)


def config_of(model: str, layers: int | None = None) -> dict[str, Any]:
    """Return the Hugging Face config of a known model, stored in bfloat16, with its first `layers` layers if given."""
    values = cast(dict[str, Any], json.loads(CATALOG.read_bytes())[model]["config"])
    text = values.get("text_config", values)
    for part in (values, text):
        part.pop("quantization_config", None)  # recipes convert the model first
    if layers is not None:
        text["num_hidden_layers"] = layers
        for name in {"layer_types", "hybrid_override_pattern"} & set(text):
            text[name] = text[name][:layers]
    return values


def _in_transformers(config: dict[str, Any]) -> Any:
    model_builder.builder(config["model_type"])  # may register a config that transformers lacks
    # transformers removes parts of its argument
    return AutoConfig.for_model(**copy.deepcopy(config))


def fake_rank(recipe: Recipe, config: dict[str, Any], rank: int, size: int) -> Rank:
    """Build one rank's model and optimizer, convert its tensor names, and plan its checkpoint and weight update.

    Raises:
        ValueError: the model or the layout does not fit.
    """
    with _group(rank, size) as world, _fused_on_meta(), _state_stays():
        policy = assemble(_in_transformers(config), Path("/nowhere"), recipe, world)
        train_step = TrainStep(policy, recipe, world)
        named = policy.adapter.to_hf(policy.weights())
        back = policy.adapter.from_hf(named)
        state = {name: part.state_dict() for name, part in checkpoint._state(train_step).items()}
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, None, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        encoding = published(recipe, policy.stored_fp8)
        catalogue = Sender(policy, encoding, cast(Any, None), world, 1.0)._catalogue
        return Rank(world, policy, train_step, named, back, planner.state_dict, plan, catalogue)


@contextmanager
def _group(rank: int, size: int) -> Iterator[Fake]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield Fake(rank, size, META, dist.group.WORLD, cast(Any, None), "", host=META)
    finally:
        dist.destroy_process_group()


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Declare the meta device as supported by the fused AdamW, which torch implements but does not list."""
    with patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta"]):
        yield


@contextmanager
def _state_stays() -> Iterator[None]:
    """Keep optimizer states in place, because meta tensors cannot be copied to the host."""
    with patch("primeslurm.trainer.optimizers.host_states.host_copy", lambda tensor: tensor):
        yield


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of this rank's shard of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def boxes(tensor: Any) -> list[Box]:
    """Return the shard of each rank of a tensor's mesh, in order of ranks, without empty ones."""
    mesh, shards = tensor.device_mesh, []
    for coordinate in torch.ones(mesh.shape).nonzero().tolist():
        shape, offset = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, coordinate, tensor.placements)
        if math.prod(shape):
            shards.append(tuple((start, start + length) for start, length in zip(offset, shape, strict=True)))
    return shards


def covers(size: Sequence[int], parts: Iterable[Box]) -> bool:
    """Return whether boxes, possibly repeated, form a grid that covers a tensor of `size` without overlap."""
    distinct = set(parts)
    grid = [sorted({box[d] for box in distinct}) for d in range(len(size))]
    even = all(
        cuts[0][0] == 0 and cuts[-1][1] == length and all(a[1] == b[0] for a, b in pairwise(cuts))
        for cuts, length in zip(grid, size, strict=True)
    )
    return even and len(distinct) == math.prod(map(len, grid))
