"""One rank of the optimizer test: trains with each optimizer, and resumes runs of one process."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from tests.trainer.conftest import make_batch, make_recipe, make_timer

TYPES = ("adamw", "muon", "sgd", "sign_sgd")
RATES = {"adamw": 1e-3, "muon": 1e-3, "sgd": 1.0, "sign_sgd": 1e-4}


def train(directory: Path, model: Path, kind: str, ep: int, world: World, host: bool = False) -> None:
    """Train three steps, with a checkpoint after the second. `host`: with state offload."""
    train_step, saver = prepare(directory, model, kind, ep, world, host)
    steps(train_step, saver, directory, 0, world)


def resume(saved: Path, directory: Path, model: Path, kind: str, ep: int, world: World, host: bool = False) -> None:
    """Resume the run in `saved`, and publish its third step in `directory`."""
    train_step, saver = prepare(saved, model, kind, ep, world, host)
    assert saver.restore(train_step) == 2
    steps(train_step, None, directory, 2, world)


def prepare(
    directory: Path, model: Path, kind: str, ep: int, world: World, host: bool = False
) -> tuple[TrainStep, Checkpoints]:
    """Return a train step with gradient clipping, and its checkpoints."""
    trainer: dict[str, Any] = {
        "optimizer": {"type": kind, "lr": RATES[kind], "weight_decay": 0.1, "max_norm": 0.1, "schedule": "cosine"},
        "parallelism": {"ep": ep},
        "memory": {"optimizer_state_offload": host},
    }
    recipe = make_recipe(model, trainer=trainer, checkpoint={"interval": 2})
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    return train_step, Checkpoints(directory, 1, recipe.checkpoint, world, None)


def steps(train_step: TrainStep, saver: Checkpoints | None, directory: Path, done: int, world: World) -> None:
    import torch

    timer = make_timer(directory)
    policy = train_step.policy
    for step in range(done + 1, 4):
        metrics = train_step.train(make_batch(step, policy.dp_rank, policy.dp_world), timer)
        assert metrics["grad_norm"] > 0.1, "clipping must be tested"
        if saver is not None:
            saver.after(step, train_step, timer)
    Publisher(policy, directory, Encoding(torch.float32), 1, world).publish(3)


def check_muon() -> None:
    """Muon's update of any sharding matches the update of whole matrices."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from primeslurm.trainer.optimizers.muon import Muon, orthogonalize

    fsdp = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    hsdp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "fsdp"))
    generator = torch.Generator().manual_seed(0)
    for shape, mesh, placements in (
        ((5, 6), fsdp, [Shard(0)]),
        ((5, 6), hsdp, [Replicate(), Shard(0)]),
        ((3, 5, 6), fsdp, [Shard(0)]),
        ((3, 5, 6), fsdp, [Shard(1)]),
        ((3, 6, 5), fsdp, [Shard(2)]),
    ):
        gradients = torch.randn((3, *shape), generator=generator)
        zeros = torch.zeros(shape)
        parameters: list[Any] = [torch.nn.Parameter(distribute_tensor(zeros, mesh, placements)) for _ in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = distribute_tensor(gradient, mesh, placements)
        named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
        Muon(named, lr=1.0, momentum=0.0, weight_decay=0.0, dtype=torch.float32).step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            expected = -0.2 * max(shape[-2:]) ** 0.5 * orthogonalize(gradient)
            torch.testing.assert_close(parameter.full_tensor(), expected, atol=1e-5, rtol=1e-5)


def check_host_states() -> None:
    """State offload is bit-identical for uneven and empty shards, and for late first gradients."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from primeslurm.recipe.sections.trainer import Optimizer
    from primeslurm.trainer.optimizers import optimizers

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    shapes = {"layers.0.a": (5, 6), "layers.0.b": (1, 6), "layers.1.a": (7, 6), "layers.1.c": (3, 5, 4), "norm": (3,)}

    def run(kind: str, host: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Module()
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            inner = model
            for part in path:
                if part not in dict(inner.named_children()):
                    inner.add_module(part, torch.nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])))
        config = Optimizer(type=kind, lr=0.1, weight_decay=0.1)
        optimizer = optimizers.build(config, model, torch.float32, host)
        for step in range(5):
            for name, parameter in model.named_parameters():
                gradient = torch.randn(shapes[name], generator=generator)
                if step or name != "layers.1.a":
                    parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        actual = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
        state = optimizer.state_dict()
        return actual, {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}

    for kind in TYPES:
        for expected, actual in zip(run(kind, False), run(kind, True), strict=True):
            assert expected.keys() == actual.keys(), kind
            for name, value in expected.items():
                same = torch.equal(value, actual[name]) if isinstance(value, torch.Tensor) else value == actual[name]
                assert same, (kind, name)


def main() -> None:
    from primeslurm.trainer.optimizers import host_states

    model, root = Path(sys.argv[1]), Path(sys.argv[2])
    world = join(Interrupt(), timeout_s=600)
    host_states.STATE_CHUNK_BYTES = 8192  # the model is small, and has to be several pieces
    check_muon()
    check_host_states()
    for kind in TYPES:
        train(root / "two" / kind, model, kind, 2, world)
        train(root / "two-host" / kind, model, kind, 2, world, host=True)
        resume(root / "one" / kind, root / "one-two" / kind, model, kind, 2, world)
    for kind in ("adamw", "muon"):  # those with states of their own
        resume(root / "two" / kind, root / "two-then-host" / kind, model, kind, 2, world, host=True)
        resume(root / "two-host" / kind, root / "host-then-two" / kind, model, kind, 2, world)
    world.close()


if __name__ == "__main__":
    main()
