"""The plans of the benchmarks of the RL loop and of recovery on GPUs are valid, and their reports are right."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.rl_on_gpus import CELLS, CONFIG, DRAFTING, HERE, report
from benchmarks.support import shared_gpu
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.records.events.policy import EngineUpdated
from primeslurm.records.events.training import WeightsPublished
from tests.support.planning import plan_on_gpus

MODEL = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **CONFIG}
DRAFTS = CONFIG | DRAFTING | {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_planned_on_its_gpus(name: str, tmp_path: Path) -> None:
    cell = CELLS[name]
    model = DRAFTS if cell.drafting else MODEL
    assert plan_on_gpus(tmp_path, cell.gpus, HERE / cell.recipe, model, **cell.settings).totals.gpus == cell.gpus


def test_recovery_benchmark_is_planned_on_four_gpus(tmp_path: Path) -> None:
    settings = {"deployment.train.gpus_per_node": 2}
    plan = plan_on_gpus(tmp_path, 4, HERE / "recovery.yaml", MODEL, **settings)
    assert plan.totals.gpus == 4 and plan.max_attempts > 1


def test_shared_gpus_are_planned_as_separate_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    shared = shared_gpu.shared_gpus(tmp_path / "made", tmp_path / "runs", [0, 1, 0])
    argv = ["nvidia-smi", "--query-gpu=index", "--id=0,1,0"]
    output = subprocess.run(argv, env={**os.environ, **shared.env}, capture_output=True, text=True, check=True)
    assert output.stdout.splitlines() == [f"--id={gpu} --query-gpu=index" for gpu in (0, 1, 0)]
    assert shared.env["CUDA_VISIBLE_DEVICES"] == "0,1,0"
    site = load_site(shared.site)
    monkeypatch.setattr(shared_gpu, "nccl_version", lambda: (2, 30))
    assert shared_gpu.shared_settings() == {}
    monkeypatch.setattr(shared_gpu, "nccl_version", lambda: (2, 29))
    settings = [f"{key}={value}" for key, value in shared_gpu.shared_settings().items()]
    recipe = load_recipe(HERE / CELLS["fp8"].recipe, [*settings, "model.path=none"])
    assert site.nodes["default"].gpus == 3 and recipe.weights.transport == "filesystem"


def test_a_report_takes_the_slowest_engine_of_each_update() -> None:
    steps = [
        {"trainer/mismatch_kl": kl, "trainer/seconds/publish": 0.5, "throughput/step_seconds": 2.0}
        for kl in (9e-4, 3e-4, 1e-4, 2e-4)
    ]
    happened = [
        EngineUpdated("engine-r0-0", 0, "confirm", seconds=0.1),
        *(WeightsPublished(version, sent_s=0.3) for version in (1, 2, 3, 4)),
        *(
            EngineUpdated("engine-r0-0", version, load_s=load, pause_s=load + 0.1)
            for version in (1, 2, 3, 4)
            for load in (0.2 * version, 0.1)
        ),
    ]
    summary = report(steps, happened)
    assert summary["steps"] == 4 and summary["mismatch_kl"] == {"median": 2.5e-4, "max": 9e-4}
    assert summary["update_seconds"] == {"publish": 0.5, "transfer": 0.3, "load": 0.7, "pause": 0.8}
    assert report([], []) == {
        "steps": 0,
        "mismatch_kl": {"median": None, "max": None},
        "update_seconds": dict.fromkeys(("publish", "transfer", "load", "pause")),
        "step_seconds": None,
        "first_step_seconds": None,
    }
