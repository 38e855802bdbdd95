"""A small model on one rank trains without FSDP exactly as with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from primeslurm.nn import one_rank
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.lora import whole
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from tests.trainer.conftest import SEQ_LEN, make_batch, make_recipe, make_timer
from tests.trainer.families import BY_NAME, write

TRAINER = {"micro_batch_tokens": 2 * SEQ_LEN, "optimizer": {"lr": 1e-3}}  # two micro batches


def trained(directory: Path, world: World, has_fsdp: bool, impl: str, trainer: dict[str, Any]) -> dict[str, Any]:
    """Train two steps. Return the metrics of the steps, and the weights."""
    model = {"path": str(directory / "model"), "dtype": "bfloat16", "impl": impl}
    recipe = make_recipe(directory, model=model, trainer=TRAINER | trainer)
    policy = build(recipe, world)
    assert any(isinstance(module, FSDPModule) for module in policy.model.modules()) == has_fsdp
    train_step = TrainStep(policy, recipe, world)
    steps = [train_step.train(make_batch(step), make_timer(directory)) for step in (1, 2)]
    exact = ("loss", "entropy", "grad_norm")
    metrics = {f"{name} {n}": value for n, step in enumerate(steps) for name, value in step.items() if name in exact}
    return metrics | {name: whole(tensor) for name, tensor in policy.model.state_dict().items()}


@pytest.mark.filterwarnings("error:.*returned a view")  # FSDP's hooks would be lost by operations in place
@pytest.mark.parametrize(
    ("case", "impl", "trainer"),
    [
        ("qwen3_moe", "custom", {"parallelism": {"activation_checkpointing": "full"}}),
        ("qwen3_moe", "custom", {"lora": {"rank": 8}}),
        ("llama-tied", "custom", {"memory": {"activation_offload": True, "lm_head_chunk": 16}}),
        ("llama-tied", "custom", {"optimizer": {"type": "muon", "lr": 1e-3}}),
        ("llama-tied", "hf", {}),
    ],
)
def test_training_equals_that_with_fsdp(
    case: str, impl: str, trainer: dict[str, Any], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(BY_NAME[case], tmp_path / "model")
    alone = trained(tmp_path, world, False, impl, trainer)
    monkeypatch.setattr(one_rank, "replaces_fsdp", lambda *_: False)
    sharded = trained(tmp_path, world, True, impl, trainer)
    assert alone.keys() == sharded.keys()
    for name, value in alone.items():
        assert torch.equal(value, sharded[name]) if isinstance(value, torch.Tensor) else value == sharded[name], name
