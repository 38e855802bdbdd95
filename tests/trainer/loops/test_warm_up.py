"""The trainer compiles with a synthetic batch before the first one, which changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.training_speed import joined
from primeslurm.trainer.assembly import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.loops.synthetic_batch import synthetic_batch
from primeslurm.trainer.policy.flops_meter import FlopsMeter
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weights import model_directory
from primeslurm.wire.batches.batch import Batch
from tests.trainer.conftest import SEQ_LEN, exported, make_batch, make_recipe, make_timer

TIMES = ("tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_gb", "compile_s", "compiles")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_run_with_warm_up_trains_bit_for_bit_as_without(
    rows: int, moe_model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without code for the CPU, which takes longest
    monkeypatch.setattr(build, "CompileConfig", partial(build.CompileConfig, backend="aot_eager"))
    recipe = make_recipe(
        moe_model,
        model={"path": str(moe_model), "dtype": "bfloat16"},
        trainer={"compile": True, "router_replay": True, "micro_batch_tokens": rows * SEQ_LEN},
    )
    runs: list[tuple[list[dict[str, float]], dict[str, Any]]] = []
    for warm in (False, True):
        torch.compiler.reset()
        torch.manual_seed(recipe.seed)
        policy = build.build(recipe, world, "varlen")
        meter = FlopsMeter.of(policy, model_directory.load_config(policy.source), recipe, world)
        step = TrainStep(policy, recipe, world, meter=meter)
        assert step.compiles
        generator = torch.get_rng_state()
        if warm:
            step.warm_up(synthetic_batch(recipe, policy))
            assert all(parameter.grad is None for parameter in policy.model.parameters())
            assert torch.equal(torch.get_rng_state(), generator)
        counted = [buffer.clone() for buffer in policy.model.buffers()]
        metrics = [step.train(batch(number, rows), make_timer(tmp_path)) for number in (1, 2)]
        assert (metrics[0]["compiles"] == 0) is warm, "the first step's shapes were compiled before, and only then"
        kept = [{name: value for name, value in each.items() if name not in TIMES} for each in metrics]
        runs.append((kept, exported(policy) | {str(i): buffer for i, buffer in enumerate(counted)}))
    (cold_metrics, cold), (warm_metrics, warmed) = runs
    assert warm_metrics == cold_metrics
    assert all(torch.equal(warmed[name], value) for name, value in cold.items())


def batch(number: int, rows: int) -> Batch:
    """Return a batch whose micro batches are rows, each as long as `rows` rows."""
    result = joined(make_batch(number, routed=True), rows)
    return Batch(msgspec.structs.replace(result.info, rows_at_once=1), result.rows)


def test_nothing_is_compiled_for_eager_layers_on_a_cpu(dense_model: Path, world: World) -> None:
    recipe = make_recipe(dense_model)
    assert TrainStep(build.build(recipe, world), recipe, world).compiles is (world.device.type == "cuda")
