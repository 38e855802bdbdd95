"""Optimizers against their formulas, and layouts and resumes against one process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.trainer.assembly.build import assemble
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.optimizers import optimizers
from primeslurm.trainer.optimizers.muon import Muon, orthogonalize
from tests.trainer.conftest import finish, make_recipe, published, start_ranks
from tests.trainer.families import BY_NAME, CASES, GENERIC_CASES, OTHER_VISION_CASE, VISION_CASES, Case
from tests.trainer.optimizer_ranks import TYPES, resume, train

STEPS = 3


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 4, bias=False)])
        self.norm = torch.nn.LayerNorm(4, bias=False)


@pytest.mark.parametrize("kind", ["sgd", "sign_sgd"])
def test_two_steps_match_the_formula(kind: str) -> None:
    model = Pair()
    config = Optimizer(type=kind, lr=0.1, momentum=0.5, weight_decay=0.01)
    optimizer = optimizers.build(config, model, torch.float32)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    average = {name: torch.zeros_like(p) for name, p in expected.items()}
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            if kind == "sgd":
                average[name] = 0.5 * average[name] + p.grad + 0.01 * expected[name]
                expected[name] = expected[name] - 0.1 * average[name]
            else:
                expected[name] = expected[name] * (1 - 0.1 * 0.01) - 0.1 * p.grad.sign()
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], atol=1e-6, rtol=1e-6)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.5 and values.max() < 1.3
    alone = torch.stack([orthogonalize(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalize(matrices), alone)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_muon_matches_torch_up_to_rounding(shape: tuple[int, int], world: World) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(shape, generator=generator), torch.randn((3, *shape), generator=generator)
    ours = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    theirs = torch.nn.Parameter(start.clone())
    muon = Muon([("w", ours)], lr=0.1, momentum=0.9, weight_decay=0.1, dtype=torch.float32)
    reference = torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient.clone()
        muon.step()
        reference.step()
    assert isinstance(ours, DTensor)
    moved = (theirs - start).norm()
    assert (ours.full_tensor() - theirs).norm() < 0.03 * moved  # torch computes in bfloat16


OF_MUON = {
    *(f"attention.{m}.weight" for m in ("wq", "wk", "wv", "wo", "wq_a", "wq_b", "wkv_a", "wkv_b", "gate")),
    *(f"attention.qkv_linear.{m}.weight" for m in ("wq", "wk", "wv")),
    *(f"delta_net.{m}.weight" for m in ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj")),
    *(f"mamba.{m}.weight" for m in ("in_proj", "out_proj")),
    *(f"feed_forward.{m}.weight" for m in ("w1", "w2", "w3", "w13")),
    *(f"moe.shared_experts.{m}.weight" for m in ("w1", "w2", "w3")),
    *(f"moe.routed_experts.{m}.weight" for m in ("down", "up")),
    *(f"moe.routed_experts.inner_experts.{m}" for m in ("w1_EFD", "w2_EDF", "w3_EFD", "gate_up_EDG", "down_EFD")),
    *(f"self_attn.{m}.weight" for m in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{m}.weight" for m in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")),
    *(f"mlp.experts.{m}" for m in ("gate_up_proj", "down_proj")),
}
"""Matrices within layers of all families."""
OF_ADAMW = {
    "delta_net.conv_weight",
    "mamba.conv_weight",
    "mlp.gate.weight",
    "moe.router.gate.weight",
    "moe.shared_experts.gate.weight",
    *(f"moe.routed_experts.inner_experts.{m}" for m in ("gate_up_bias_EG", "down_bias_ED")),
}
"""Parameters within layers with several dimensions that Muon does not train."""


def muons(case: Case, world: World, **trainer: Any) -> tuple[set[str], set[str]]:
    """Return the names of the parameters that Muon trains, and of the others."""
    config, path = case.config(), Path("/nowhere")
    sees = hasattr(config, "vision_config") and case is not OTHER_VISION_CASE
    named = {"path": str(path), "dtype": "float32", "vlm": {"freeze_vision_encoder": False} if sees else None}
    policy = assemble(config, path, make_recipe(path, model=named, trainer=trainer), world)
    built = optimizers.build(Optimizer(type="muon", lr=0.1), policy.model, torch.float32)
    actual: tuple[set[str], set[str]] = (set(), set())
    for optimizer in built:
        for group in optimizer.param_groups:
            actual[not isinstance(optimizer, Muon)].update(group["param_names"])
    assert sum(map(len, actual)) == sum(p.requires_grad for p in policy.model.parameters())
    return actual


def test_muon_trains_exactly_the_matrices_of_layers(world: World) -> None:
    ours, others = set(), set()
    for case in (*CASES, *GENERIC_CASES, *VISION_CASES, OTHER_VISION_CASE):
        for names, whole in zip((ours, others), muons(case, world), strict=True):
            names |= {re.sub(r".*\blayers\.\d+\.", "layer ", name) for name in whole}
    assert ours == {f"layer {name}" for name in OF_MUON}
    assert {f"layer {name}" for name in OF_ADAMW} <= others


def test_muon_trains_adapters(world: World) -> None:
    case = BY_NAME["qwen3_moe"]
    ours, others = muons(case, world, lora={"rank": 8})
    assert not others and all(name.endswith(("_lora_a", "_lora_b")) for name in ours)
    assert {name.split(".")[2] for name in ours} == {"attention", "moe"}


def rates(schedule: str, floor: float, steps: int = 10) -> Iterator[float]:
    """Return the learning rates of the first steps, with two steps of warm-up."""
    config = Optimizer(type="sgd", lr=2.0, schedule=schedule, warmup_steps=2, min_lr_ratio=floor)
    optimizer = optimizers.build(config, Pair(), torch.float32)
    scheduler = optimizers.schedule(config, 10, optimizer)
    for _ in range(steps):
        yield optimizer.lr
        optimizer.step()
        scheduler.step()


def test_decay_reaches_the_minimum_one_step_after_the_last() -> None:
    for schedule in ("linear", "cosine"):
        actual = list(rates(schedule, 0.25, steps=11))
        assert actual[9] > actual[10] == pytest.approx(0.25 * 2.0)


def test_schedules() -> None:
    assert list(rates("constant", 0.0)) == [1.0] + [2.0] * 9
    linear, cosine = list(rates("linear", 0.25)), list(rates("cosine", 0.25))
    for actual in (linear, cosine):
        assert actual[:3] == [1.0, 2.0, 2.0]
        assert actual == sorted(actual[:2]) + sorted(actual[2:], reverse=True)
        assert actual[-1] > 0.25 * 2.0
    progress = [step / 8 for step in range(8)]
    assert linear[2:] == pytest.approx([2.0 * (0.25 + 0.75 * (1 - p)) for p in progress])
    assert cosine[2:] == pytest.approx([2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi * p)) / 2) for p in progress])


def trained(directory: Path) -> dict[str, torch.Tensor]:
    return published(directory, STEPS)


@pytest.fixture(scope="module")
def runs(moe_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every optimizer with one process, two expert-parallel ranks, and with a resume in between."""
    root = tmp_path_factory.mktemp("optimizers")
    for kind in TYPES:
        train(root / "one" / kind, moe_model, kind, 1, world)
    finish(start_ranks(2, "tests.trainer.optimizer_ranks", str(moe_model), str(root)))
    for kind in TYPES:
        resume(root / "two" / kind, root / "two-one" / kind, moe_model, kind, 1, world)
        resume(root / "one" / kind, root / "one-one" / kind, moe_model, kind, 1, world)
    return root


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("layout", ["two", "two-one", "one-two"])
def test_ranks_and_resumes_match_one_process(layout: str, kind: str, runs: Path) -> None:
    expected, actual = trained(runs / "one" / kind), trained(runs / layout / kind)
    assert set(actual) == set(expected)
    differ = torch.cat([((actual[name] - expected[name]).abs() > 1e-5).flatten() for name in expected])
    # The sign of a gradient that is almost nothing is anyone's guess.
    assert differ.float().mean() < 0.002


@pytest.mark.parametrize("kind", TYPES)
def test_resumed_run_matches_uninterrupted_run(kind: str, runs: Path) -> None:
    expected, actual = trained(runs / "one" / kind), trained(runs / "one-one" / kind)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *[("two-host", kind) for kind in TYPES],
        *[(layout, kind) for layout in ("two-then-host", "host-then-two") for kind in ("adamw", "muon")],
    ],
)
def test_state_offload_does_not_change_results(layout: str, kind: str, runs: Path) -> None:
    """Also for a run that resumes in the other mode."""
    expected, actual = trained(runs / "two" / kind), trained(runs / layout / kind)
    assert set(actual) == set(expected)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", TYPES)
def test_checkpoint_of_offloaded_state_loads_without_offload(kind: str, runs: Path) -> None:
    plain, host = (runs / layout / kind / "checkpoints" for layout in ("two", "two-host"))
    assert described(plain) == described(host)


def described(directory: Path) -> dict[str, object]:
    (trainer,) = directory.glob("*2/trainer")
    actual = dcp.FileSystemReader(trainer).read_metadata().state_dict_metadata
    return {
        name: (each.size, each.properties.dtype, sorted(tuple(chunk.offsets) for chunk in each.chunks))
        if isinstance(each, TensorStorageMetadata)
        else type(each)
        for name, each in actual.items()
    }
