"""Every family trains on two ranks as on one, with the parallelism that it supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from primeslurm.models import capabilities
from primeslurm.recipe import Recipe
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.weight_transfer import filesystem
from tests.trainer.as_released import stack_experts
from tests.trainer.conftest import SEQ_LEN, make_recipe, tensors
from tests.trainer.families import CASES, GENERIC_CASES, Case, write
from tests.trainer.ranks import train, train_on_ranks

pytestmark = pytest.mark.usefixtures("unmeasured")

COMPARED = ("loss", "off_policy_kl", "mismatch_kl", "entropy", "masked_fraction", "grad_norm")
FIRST = {case.config().model_type: case for case in reversed((*CASES, *GENERIC_CASES))}
EVERY_COMMIT = (
    *("gpt_oss", "nemotron_h", "qwen3_5_moe", "qwen3_vl_moe", "llama", "glm4_moe", "laguna", "minimax_m2"),
    *("deepseek_v3", "glm_moe_dsa", "mixtral"),
)
"""Families that every commit tests. Each of the other families has the same layers as one of them."""
SPLIT = [
    pytest.param(case, id=case.name, marks=() if case.name in EVERY_COMMIT else pytest.mark.campaign)
    for case in (*CASES, *GENERIC_CASES)
    if case in FIRST.values()
]


def recipe(path: Path, case: Case, size: int) -> Recipe:
    able = capabilities(case.config().model_type, "auto")
    assert able is not None
    parallelism = {
        "ep": size if able.ep else 1,
        "cp": size if able.cp else 1,
        "activation_checkpointing": "none" if size == 1 else "full",
    }
    trainer: dict[str, Any] = {"optimizer": {"lr": 1e-3}, "parallelism": parallelism}
    return make_recipe(path, max_steps=1, seq_len=SEQ_LEN, trainer=trainer)


@pytest.fixture(scope="module")
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, float], Path]]:
    """Return by case that is tested: metrics of the step, and directory of model and published weights."""
    tested = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    root = tmp_path_factory.mktemp("families")
    runs = {}
    for case in tested:
        path = write(case, root / case.name / "model")
        if case.name == "qwen3_5_moe":
            stack_experts(path)  # as it is released in bfloat16
        runs[root / case.name] = recipe(path, case, 2)
    return {out.name: (first[0], out) for out, (first, _) in zip(runs, train_on_ranks(2, runs), strict=True)}


@pytest.mark.parametrize("case", SPLIT)
def test_two_ranks_match_one(
    case: Case, two_ranks: dict[str, tuple[dict[str, float], Path]], world: World, tmp_path: Path
) -> None:
    actual, directory = two_ranks[case.name]
    expected = train(recipe(directory / "model", case, 1), tmp_path, world)[0]
    for name in COMPARED:
        assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    theirs, ours = (tensors(filesystem.version_dir(run, 1)) for run in (directory, tmp_path))
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        torch.testing.assert_close(tensor, ours[name], atol=5e-4, rtol=1e-3, msg=name)
