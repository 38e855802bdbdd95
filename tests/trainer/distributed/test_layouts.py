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

from primeslurm.recipe import Recipe
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.weight_transfer import filesystem
from tests.trainer.conftest import finish, make_recipe, start_ranks
from tests.trainer.ranks import train

STEPS = 2
COMPARED = ("loss", "off_policy_kl", "mismatch_kl", "entropy", "masked_fraction", "grad_norm")
Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def recipe_for(model: Path, **parallelism: Any) -> Recipe:
    """Two steps of the model under a layout."""
    trainer = {"optimizer": {"lr": 1e-3}, "parallelism": parallelism, "router_replay": True}
    return make_recipe(model, max_steps=STEPS, trainer=trainer)


def published(directory: Path) -> dict[str, torch.Tensor]:
    """The weights after the last step."""
    files = filesystem.version_dir(directory, STEPS).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def one_rank(moe_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What a single rank computes."""
    directory = tmp_path_factory.mktemp("one")
    return train(recipe_for(moe_model), directory, world), published(directory)


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param({"ep": 2, "cp": 2, "activation_checkpointing": "full"}, id="ep-cp"),
        pytest.param({"dp_replicate": 2, "activation_checkpointing": "selective"}, id="hsdp"),
    ],
)
def test_two_ranks_equal_one(parallelism: dict[str, Any], moe_model: Path, one_rank: Result, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(recipe_for(moe_model, **parallelism).model_dump_json(by_alias=True))
    outputs = finish(start_ranks(2, "-m", "tests.trainer.ranks", str(path), str(tmp_path)))
    metrics = [[json.loads(line[8:]) for line in out.splitlines() if line.startswith("METRICS ")] for out in outputs]
    for name in COMPARED:
        assert [m[name] for m in metrics[1]] == [m[name] for m in metrics[0]], "ranks report the same metrics"
        for mine, expected in zip(metrics[0], one_rank[0], strict=True):
            assert mine[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    tensors = published(tmp_path)
    assert set(tensors) == set(one_rank[1])
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, one_rank[1][name], atol=5e-4, rtol=1e-3, msg=name)
