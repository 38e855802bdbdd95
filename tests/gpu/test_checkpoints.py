"""A GPU run with offloaded states and asynchronous checkpoints resumes unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primeslurm.wire.stored import checkpoints
from scripts.models import tiny_model
from tests.trainer.conftest import finish, make_recipe, start_fresh_ranks

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(minutes=6),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def train(directory: Path, max_steps: int, asynchronous: bool, offload: bool) -> list[float]:
    """Train SFT on one GPU up to `max_steps`, resuming from `directory`. Return the losses of all steps."""
    data, model = directory.parent / "data.jsonl", directory.parent / "model"
    recipe = make_recipe(
        model,
        task="sft",
        sft={"data": {"path": str(data)}, "batch_size": 8},
        environments=[],
        monitor={"tensorboard": False},
        max_steps=max_steps,
        model={"path": str(model), "dtype": "bfloat16"},
        trainer={"optimizer": {"lr": 1e-3}, "memory": {"optimizer_offload": offload}},
        checkpoint={"interval": 1, "asynchronous": asynchronous},
    )
    path = directory / "recipe.json"
    directory.mkdir(exist_ok=True)
    path.write_text(recipe.model_dump_json(by_alias=True))
    where: list[Any] = ["--recipe", path, "--run-dir", directory, "--attempt", max_steps, "--device", "cuda"]
    finish(start_fresh_ranks(1, "primeslurm.trainer", *map(str, where)))
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_asynchronous_checkpoints_of_offloaded_states(tmp_path: Path) -> None:
    tiny_model.write_model(tmp_path / "model")
    lines = (json.dumps(chat) + "\n" for chat in tiny_model.demonstrations(64, 0.0, 0))
    (tmp_path / "data.jsonl").write_text("".join(lines))
    expected = train(tmp_path / "plain", 6, asynchronous=False, offload=False)
    for offload in (False, True):
        directory = tmp_path / f"offload-{offload}"
        train(directory, 3, asynchronous=True, offload=offload)
        assert checkpoints.committed(directory) == [2, 3]
        assert train(directory, 6, asynchronous=True, offload=offload) == pytest.approx(expected, rel=2e-2)
