"""Memory savings do not change results. tests/gpu/test_memory.py measures the savings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import activation_offload
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from tests.trainer.conftest import SEQ_LEN, exported, make_batch, make_recipe, make_timer

Result = tuple[list[float], dict[str, torch.Tensor]]


def train(model: Path, directory: Path, world: World, **trainer: Any) -> Result:
    """Return losses, gradient norms and final weights of two steps of two micro batches."""
    recipe = make_recipe(model, trainer={"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 2 * SEQ_LEN, **trainer})
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    metrics = [train_step.train(make_batch(step), make_timer(directory)) for step in (1, 2)]
    return [m[name] for m in metrics for name in ("loss", "grad_norm")], exported(policy)


@pytest.fixture(scope="module")
def plain(moe_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(moe_model, tmp_path_factory.mktemp("plain"), world)


@pytest.mark.parametrize(
    "trainer",
    [
        {"memory": {"activation_offload": True}},
        {"memory": {"activation_offload": True}, "parallelism": {"activation_checkpointing": "selective"}},
        {"memory": {"activation_offload": True}, "parallelism": {"activation_checkpointing": "full"}},
        {"memory": {"optimizer_offload": True}},
        {"memory": {"optimizer_state_offload": True}},
        {"memory": {"optimizer_offload": True, "activation_offload": True, "lm_head_chunk": 16}},
        {"parallelism": {"reshard_after_forward": False}},
        {"parallelism": {"reduce_gradients": "step"}},
    ],
    ids=str,
)
def test_offload_does_not_change_results(
    trainer: dict[str, Any], moe_model: Path, plain: Result, world: World, tmp_path: Path
) -> None:
    metrics, tensors = train(moe_model, tmp_path, world, **trainer)
    # A loss is a sum of terms of about 1 and both signs, and may be close to zero: what another order of the sum (of
    # `lm_head_chunk`) changes is a few float32 roundings of the terms, however small their sum is.
    assert metrics == pytest.approx(plain[0], rel=1e-5, abs=1e-6)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, plain[1][name], atol=1e-4, rtol=1e-4, msg=name)


def test_activations_are_offloaded_and_weights_are_not(
    moe_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[int, ...]] = []
    real = activation_offload._Saved.__init__

    def note(saved: Any, tensor: torch.Tensor, layer: Any) -> None:
        left.append(tuple(tensor.shape))
        real(saved, tensor, layer)

    monkeypatch.setattr(activation_offload._Saved, "__init__", note)
    for checkpointing in ("full", "none"):
        left.clear()
        parallelism = {"activation_checkpointing": checkpointing}
        recipe = make_recipe(moe_model, trainer={"memory": {"activation_offload": True}, "parallelism": parallelism})
        policy = build(recipe, world)
        tokens = torch.randint(3, 128, (1, 48))
        policy.logits(tokens, torch.arange(48)[None])[0].sum().backward()
        if checkpointing == "full":
            assert left == [(1, 48, 32)] * 2, "the input of each of two layers"
        weights = {tuple(parameter.shape) for parameter in policy.model.parameters() if parameter.ndim > 1}
        assert left and not weights & set(left)
