"""FP8 and LoRA with expert parallelism match one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from primeslurm.trainer.distributed.world import World
from scripts.models import tiny_model
from tests.trainer import families
from tests.trainer.conftest import make_recipe, published
from tests.trainer.families import write
from tests.trainer.ranks import train, train_on_ranks

STEPS = 2
# trainer settings, and parallel layout
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": ({"fp8": True}, {"ep": 2, "activation_checkpointing": "full"}),
    "lora": (
        {"lora": {"rank": 8, "targets": ["o_proj", "experts"]}},
        {"ep": 2, "activation_checkpointing": "selective"},
    ),
    "glm5": ({"fp8": True}, {"ep": 2, "cp": 2, "activation_checkpointing": "full"}),
}


def test_two_ranks_match_one(world: World, tmp_path: Path) -> None:
    qwen, glm = tmp_path / "qwen", tmp_path / "glm"
    tiny_model.write_model(qwen, "qwen3_moe", hidden=128)
    write(families.BY_NAME["glm_moe_dsa-short"], glm)
    runs, expected = {}, []
    for name, (options, layout) in CASES.items():
        model = glm if name == "glm5" else qwen
        (tmp_path / f"{name}-one").mkdir()
        trainer = {"optimizer": {"lr": 1e-3}, **options}
        recipe = make_recipe(model, max_steps=STEPS, trainer=trainer)
        expected.append(train(recipe, tmp_path / f"{name}-one", world))
        runs[tmp_path / name] = make_recipe(model, max_steps=STEPS, trainer={**trainer, "parallelism": layout})
    fp8, adapters, glm5 = (
        list(zip(metrics[0], one, strict=True)) for metrics, one in zip(train_on_ranks(2, runs), expected, strict=True)
    )
    for mine, one in adapters:
        for name in ("loss", "entropy", "grad_norm"):
            assert mine[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    tensors, ones = published(tmp_path / "lora", STEPS), published(tmp_path / "lora-one", STEPS)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, ones[name], atol=5e-4, rtol=1e-3, msg=name)
    # Rows are scaled one by one, so they do not care who computes them. Weight gradients sum over blocks of 128 tokens,
    # and which tokens share a block and a scale depends on the layout.
    for (first, first_one), (second, second_one) in (fp8, glm5):
        assert first["loss"] == pytest.approx(first_one["loss"], rel=1e-4)
        assert first["entropy"] == pytest.approx(first_one["entropy"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(first_one["grad_norm"], rel=0.02)
        assert second["entropy"] == pytest.approx(second_one["entropy"], rel=1e-3)
