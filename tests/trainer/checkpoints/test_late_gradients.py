"""Checkpoints of parameters without a gradient so far."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.optimizers import optimizers
from primeslurm.trainer.optimizers.container import add_missing_state
from tests.trainer import late_ranks
from tests.trainer.conftest import finish, start_ranks
from tests.trainer.image_rows import write_vision_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        pytest.param("adamw", False, marks=pytest.mark.campaign),
        ("muon", True),
        pytest.param("sgd", False, marks=pytest.mark.campaign),
    ],
)
def test_run_resumes_before_its_first_image(kind: str, host: bool, model: Path, world: World, tmp_path: Path) -> None:
    late_ranks.check(tmp_path, model, kind, host, world)


def test_two_ranks_resume_before_their_first_image(model: Path, tmp_path: Path) -> None:
    finish(start_ranks(2, "tests.trainer.late_ranks", str(model), str(tmp_path)))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "sign_sgd"])
def test_added_state_is_the_initial_optimizer_state(kind: str, momentum: float, world: World) -> None:
    begun, added = (_two_steps(kind, momentum, add) for add in (False, True))
    assert added.keys() == begun.keys()
    for name, value in begun.items():
        assert added[name].dtype == value.dtype and torch.equal(added[name], value), name


def _two_steps(kind: str, momentum: float, add: bool) -> Tensors:
    """Return parameters and state after two steps, with state added before the first one if `add`."""
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
