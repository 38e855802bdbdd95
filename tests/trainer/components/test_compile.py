"""Compiled layers compute what others do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.training_speed import joined
from primeslurm.models.registry import bundled, model_types
from primeslurm.trainer.assembly import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer
from tests.trainer.families import BY_NAME, write
from tests.trainer.gradients import Layout, gradients

pytestmark = pytest.mark.usefixtures("unmeasured")

ALIKE = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}
"""Model types that are built by another one's code, and the case that stands for them."""
VARIED = ("deepseek_v3", "gpt_oss", "qwen3_moe")
"""Traced a second time, for rows of any number, which takes longest: latent attention, sinks, and neither."""
COMPILED = sorted(
    {ALIKE.get(model_type, model_type) for model_type, can in model_types(bundled()).items() if can.compile}
)

# Cases that are traced for every commit. Campaigns trace the others.
QUICK = ("glm4_moe",)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Each test compiles its own."""
    yield
    torch.compiler.reset()


def check(case: str, directory: Path, world: World, checkpointing: str, first: int = 1) -> None:
    """Whether compiled gradients are as near to the exact ones as those that are rounded alike."""
    write(BY_NAME[case], directory / case)
    layers = {"activation_checkpointing": checkpointing}
    exact = gradients(Layout(case, layers, first=first), directory, world)
    rounded = gradients(Layout(case, layers, "varlen", "bfloat16", first=first), directory, world)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = gradients(Layout(case, layers, "varlen", "bfloat16", compile=True, first=first), directory, world)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    for name, gradient in exact.items():
        allowed = 1.5 * (rounded[name] - gradient).norm() + 1e-3 * gradient.norm()
        assert (compiled[name] - gradient).norm() <= allowed, name


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_whose_recurrences_have_kernels_are_left_to_them(
    checkpointing: str, tmp_path: Path, world: World
) -> None:
    case = tmp_path / "nemotron_h"
    write(BY_NAME["nemotron_h"], case)
    trainer = {"parallelism": {"activation_checkpointing": checkpointing}, "compile": True}
    recipe = make_recipe(case, model={"path": str(case), "dtype": "bfloat16"}, trainer=trainer)
    layers = build.build(recipe, world, "varlen").model.layers.values()
    recurrent = [layer.mamba is not None for layer in layers]
    assert any(recurrent) and not all(recurrent)
    assert [layer._compiled_call_impl is None for layer in layers] == recurrent


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.campaign), "full"])
def test_batch_of_another_size_is_not_compiled_again(
    checkpointing: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CompileConfig", partial(build.CompileConfig, backend="aot_eager"))
    path = write(BY_NAME["llama-tied"], tmp_path / "model")
    parallelism = {"activation_checkpointing": checkpointing}
    trainer = {"compile": True, "micro_batch_tokens": 4 * SEQ_LEN, "parallelism": parallelism}
    recipe = make_recipe(path, model={"path": str(path), "dtype": "bfloat16"}, trainer=trainer)
    train_step = TrainStep(build.build(recipe, world, "varlen"), recipe, world)
    compiles = []
    for step, (rows, at_once) in enumerate([(2, 2), (8, 4), (2, 1), (3, 3)], 1):
        batch = joined(make_batch(step, rows=rows), at_once)
        batch = Batch(msgspec.structs.replace(batch.info, rows_at_once=1), batch.rows)
        compiles.append(train_step.train(batch, make_timer(tmp_path))["compiles"])
    assert compiles[0] > 0 and not any(compiles[1:]), compiles


@pytest.mark.campaign
def test_gradients_of_compiled_layers_are_as_near_to_the_exact_ones(tmp_path: Path, world: World) -> None:
    check("qwen3_moe", tmp_path, world, "full", first=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.campaign) for case in COMPILED]
)
def test_layers_of_every_family_that_can_be_compiled_are_traced(
    case: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # without code for a CPU, which takes longest and is not what GPUs run
    monkeypatch.setattr(build, "CompileConfig", partial(build.CompileConfig, backend="aot_eager"))
    check(case, tmp_path, world, "none", first=1 if case in VARIED else 2)
