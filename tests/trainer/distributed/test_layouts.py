"""Every parallel layout trains the same model: same losses, gradient norms and weights.

Three of four tokens have replayed experts, the others choose their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from primeslurm.recipe import Recipe
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import finish, make_recipe, printed, published, start_ranks
from tests.trainer.ranks import train, train_on_ranks
from tests.trainer.reduced_bytes import MICRO_BATCHES, WAYS

STEPS = 2
COMPARED = ("loss", "off_policy_kl", "mismatch_kl", "entropy", "masked_fraction", "grad_norm")
Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


SEQUENCES = {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1}
"""Bounds that some ratios exceed."""


def recipe_for(model: Path, loss: dict[str, Any] | None = None, **parallelism: Any) -> Recipe:
    trainer = {
        "optimizer": {"lr": 1e-3},
        "parallelism": parallelism,
        "router_replay": True,
        "loss": loss or {"type": "dppo"},
    }
    return make_recipe(model, max_steps=STEPS, trainer=trainer)


@pytest.fixture(scope="module")
def one_rank(moe_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    actual = []
    for loss in (None, SEQUENCES):
        directory = tmp_path_factory.mktemp("one")
        actual.append((train(recipe_for(moe_model, loss), directory, world), published(directory, STEPS)))
    assert all(0 < metrics["masked_fraction"] < 1 for metrics in actual[1][0])
    return actual


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param({"ep": 2, "cp": 2, "activation_checkpointing": "full"}, id="ep-cp"),
        pytest.param({"dp_replicate": 2, "activation_checkpointing": "selective"}, id="hsdp"),
    ],
)
def test_two_ranks_match_one(
    parallelism: dict[str, Any], moe_model: Path, one_rank: list[Result], tmp_path: Path
) -> None:
    """With ratios of tokens, and of sequences that context-parallel ranks share."""
    losses = {"tokens": None, "sequences": SEQUENCES}
    runs = {tmp_path / name: recipe_for(moe_model, loss, **parallelism) for name, loss in losses.items()}
    for metrics, out, (expected, weights) in zip(train_on_ranks(2, runs), runs, one_rank, strict=True):
        compare(metrics, expected)
        tensors = published(out, STEPS)
        assert set(tensors) == set(weights)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, weights[name], atol=5e-4, rtol=1e-3, msg=name)


def test_reducing_gradients_once_per_step_saves_collectives(
    moe_model: Path, one_rank: list[Result], tmp_path: Path
) -> None:
    """Two micro batches of one row per rank, of a model with four FSDP modules."""
    ways: list[dict[str, Any]] = [
        {},
        {"reduce_gradients": "step"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": False, "reduce_gradients": "step"},
    ]
    runs = {}
    for number, parallelism in enumerate(ways):
        recipe = recipe_for(moe_model, **parallelism)
        trainer = recipe.trainer.model_copy(update={"micro_batch_tokens": recipe.seq_len})
        runs[tmp_path / str(number)] = recipe.model_copy(update={"trainer": trainer})
    begun = []
    for metrics, out in zip(train_on_ranks(2, runs), runs, strict=True):
        compare(metrics, one_rank[0][0])
        begun.append(metrics[0][-1]["collectives"])
        for name, tensor in published(out, STEPS).items():
            torch.testing.assert_close(tensor, one_rank[0][1][name], atol=5e-4, rtol=1e-3, msg=name)
    parts = 4
    assert begun[0] - begun[1] == parts, "reduced once instead of twice"
    assert begun[2] - begun[3] == 2 * parts, "gathered once instead of twice, too"


def compare(metrics: list[list[dict[str, float]]], expected: list[dict[str, float]]) -> None:
    for name in COMPARED:
        assert [m[name] for m in metrics[1]] == [m[name] for m in metrics[0]], "ranks report the same metrics"
        for mine, one in zip(metrics[0], expected, strict=True):
            assert mine[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_bytes_of_eight_micro_batches(moe_model: Path) -> None:
    """FSDP reduces gradients once per micro batch or step, in the selected dtype."""
    outputs = finish(start_ranks(2, "tests.trainer.reduced_bytes", str(moe_model)))
    first, second = (printed(out, "COUNTED") for out in outputs)
    assert first == second and len(first) == len(WAYS)
    each, rounded, once, once_rounded, stays = first
    size = each["parameters"]
    assert each["reduced"] == pytest.approx(4 * MICRO_BATCHES * size, rel=0.01), "padding aside"
    assert [way["reduced"] / each["reduced"] for way in first] == [1, 1 / 2, 1 / 8, 1 / 16, 1 / 8]
    assert once["gathered"] == each["gathered"] == rounded["gathered"]
    assert stays["gathered"] < each["gathered"] / 8, "weights are gathered once, too"
    for way in (once, stays):
        assert way["grad_norm"] == pytest.approx(each["grad_norm"], rel=1e-5)
    for way in (rounded, once_rounded):
        assert way["grad_norm"] == pytest.approx(each["grad_norm"], rel=2**-8)
        assert way["grad_norm"] != each["grad_norm"]
