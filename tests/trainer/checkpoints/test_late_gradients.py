"""Checkpoints of parameters that have had no gradient yet."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from primeslurm.trainer.checkpoints.state_planner import StatePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.components.loss import from_recipe
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.loops.step import Learner
from primeslurm.trainer.optimizers import optimizers
from primeslurm.trainer.optimizers.container import add_missing_state
from tests.trainer import late_ranks
from tests.trainer.conftest import finish, make_batch, make_recipe, make_timer, start_ranks
from tests.trainer.families import CASES, write
from tests.trainer.image_rows import write_vision_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL directory."""
    return write_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.mark.parametrize(("kind", "host"), [("adamw", False), ("muon", True), ("sgd", False)])
def test_a_run_resumes_before_its_first_image(kind: str, host: bool, model: Path, world: World, tmp_path: Path) -> None:
    late_ranks.check(tmp_path, model, kind, host, world)


def test_two_ranks_resume_before_their_first_image(model: Path, tmp_path: Path) -> None:
    finish(start_ranks(2, "tests.trainer.late_ranks", str(model), str(tmp_path)))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "sign_sgd"])
def test_added_state_is_the_state_in_which_an_optimizer_begins(kind: str, momentum: float, world: World) -> None:
    begun, added = (_two_steps(kind, momentum, add) for add in (False, True))
    assert added.keys() == begun.keys()
    for name, value in begun.items():
        assert added[name].dtype == value.dtype and torch.equal(added[name], value), name


def _two_steps(kind: str, momentum: float, add: bool) -> Tensors:
    """Parameters and state after two steps. `add`: the optimizer's state is there before the first one."""
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))

    def draw(*shape: int) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)])

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(6, 4, bias=False)])
    model.layers[0].weight = torch.nn.Parameter(draw(4, 6))
    model.norm = torch.nn.Parameter(draw(4))
    optimizer = optimizers.build(
        Optimizer(type=kind, lr=0.1, momentum=momentum, weight_decay=0.1), model, torch.float32
    )
    for each in optimizer if add else ():
        add_missing_state(each)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = draw(*parameter.shape)
        optimizer.step()
    state = {name: p.detach() for name, p in model.named_parameters()} | optimizer.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def test_a_parameter_that_another_optimizer_trains_now_begins_anew(world: World, tmp_path: Path) -> None:
    """As convolutions, which Muon trained in earlier releases."""
    path = write(next(case for case in CASES if case.name == "qwen3_5_text"), tmp_path / "model")
    recipe = make_recipe(path, trainer={"optimizer": {"type": "muon", "lr": 1e-3}}, checkpoint={"interval": 1})

    def learner() -> Learner:
        policy, loss = build(recipe, world), from_recipe(recipe.trainer.loss)
        return Learner(policy, recipe.trainer.optimizer, recipe.max_steps, loss, world)

    def stacks(model: torch.nn.Module) -> list[torch.Tensor]:
        return [p for name, p in model.named_parameters() if "layers." in name and p.ndim > 1]

    with patch.object(optimizers, "matrices", stacks):
        before = learner()
    before.train(make_batch(1), make_timer(tmp_path))
    Checkpoints(tmp_path, 1, recipe.checkpoint, world, None).after(1, before, make_timer(tmp_path))
    after = learner()
    assert Checkpoints(tmp_path, 2, recipe.checkpoint, world, None).restore(after) == 1
    old, new = (each.optimizer.state_dict() for each in (before, after))
    moved = {name for name in new if name.startswith("state.") and name not in old}
    assert {name.rpartition(".")[2] for name in moved} == {"step", "exp_avg", "exp_avg_sq"}
    assert all("conv_weight" in name and not new[name].any() for name in moved)
    options = {name for name in new if name.startswith("param_groups.") and name not in old}
    assert {new[name] for name in options if name.endswith(".eps")} == {recipe.trainer.optimizer.eps}
    for name in (new.keys() & old.keys()) - {name for name in new if "conv_weight" in name}:
        same = torch.equal(new[name], old[name]) if isinstance(new[name], torch.Tensor) else new[name] == old[name]
        assert same, name
    for name, parameter in after.policy.model.named_parameters():
        assert torch.equal(parameter, before.policy.model.get_parameter(name)), name
    assert after.optimizer.lr == before.optimizer.lr


STORED = ("model.a", "optimizer.param_groups.a.lr", "optimizer.state.a.step", "optimizer.state.a.exp_avg")


def test_only_the_whole_optimizer_state_of_a_parameter_may_be_missing(tmp_path: Path) -> None:
    dcp.save({name: torch.ones(2) for name in STORED}, checkpoint_id=tmp_path, no_dist=True)

    def load(*more: str) -> Tensors:
        state = {name: torch.full((2,), 7.0) for name in (*STORED, *more)}
        dcp.load(state, checkpoint_id=tmp_path, planner=StatePlanner(), no_dist=True)
        return state

    late = ("optimizer.state.a.b.step", "optimizer.state.a.b.exp_avg")
    expected = dict.fromkeys(STORED, (1.0, 1.0)) | dict.fromkeys(late, (0.0, 0.0))
    assert {name: tuple(value.tolist()) for name, value in load(*late).items()} == expected
    for name in ("model.b", "optimizer.param_groups.b.lr", "optimizer.state.a.exp_avg_sq"):
        with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: {name}"):
            load(name)
