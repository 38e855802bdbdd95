"""Every layout of ranks trains the same model: same losses, same gradient norms, same weights.

Three of four tokens go to experts that are given to the trainer, the others to those of its own choice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from primeslurm.wire import weights
from tests.trainer.conftest import finish, make_recipe, start_ranks

STEPS = 2
SEQ_LEN = 256  # context parallelism splits rows into blocks of 128
COMPARED = ("loss", "off_policy_kl", "mismatch_kl", "entropy", "masked_fraction", "grad_norm")
Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def train(model: Path, directory: Path, size: int, **parallelism: Any) -> Result:
    """Metrics of each step, and the weights after the last."""
    trainer = {"optimizer": {"lr": 1e-3}, "parallelism": parallelism, "router_replay": True}
    recipe = make_recipe(model, max_steps=STEPS, seq_len=SEQ_LEN, trainer=trainer)
    path = directory / "recipe.json"
    path.write_text(recipe.model_dump_json(by_alias=True))
    outputs = finish(start_ranks(size, "-m", "tests.trainer.ranks", str(path), str(directory)))
    metrics = [[json.loads(line[8:]) for line in out.splitlines() if line.startswith("METRICS ")] for out in outputs]
    for other in metrics[1:]:
        for name in COMPARED:
            assert [m[name] for m in other] == [m[name] for m in metrics[0]], "ranks report the same metrics"
    tensors: dict[str, torch.Tensor] = {}
    for file in weights.version_dir(directory, STEPS).glob("*.safetensors"):
        tensors |= load_file(file)
    return metrics[0], tensors


@pytest.fixture(scope="module")
def one_rank(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What a single rank computes."""
    return train(moe_model, tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param({}, id="fsdp"),
        pytest.param({"ep": 2, "activation_checkpointing": "full"}, id="ep"),
        pytest.param({"dp_replicate": 2}, id="hsdp"),
        pytest.param({"cp": 2, "activation_checkpointing": "selective"}, id="cp", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(parallelism: dict[str, Any], moe_model: Path, one_rank: Result, tmp_path: Path) -> None:
    metrics, tensors = train(moe_model, tmp_path, 2, **parallelism)
    for mine, expected in zip(metrics, one_rank[0], strict=True):
        for name in COMPARED:
            assert mine[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert set(tensors) == set(one_rank[1])
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, one_rank[1][name], atol=5e-4, rtol=1e-3, msg=name)
