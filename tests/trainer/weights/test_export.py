"""`primeslurm export` produces the model that was published at the step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from primeslurm.base.errors import UsageError
from primeslurm.cli import app
from primeslurm.cli.lazy_verbs import readable
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.weight_transfer import filesystem
from tests.trainer.conftest import make_batch, make_recipe, make_timer, tensors


def test_export_matches_published_weights(moe_model: Path, world: World, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "not" / "there" / "model"
    recipe = make_recipe(moe_model, model={"path": str(moe_model), "dtype": "bfloat16"}, checkpoint={"interval": 1})
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    saver, timer = Checkpoints(run, 1, recipe.checkpoint, world, None), make_timer(run)
    publisher = Publisher(policy, run, Encoding(torch.bfloat16), 3, world)
    for step in (1, 2):
        train_step.train(make_batch(step), timer)
        publisher.publish(step)
        saver.after(step, train_step, timer)
    (run / "lock.json").write_text("{}")
    (run / "recipe.resolved.json").write_text(recipe.model_dump_json(by_alias=True))

    wrong = CliRunner().invoke(readable(app), ["export", str(run), str(moe_model), "--step", "7"]).exception
    assert isinstance(wrong, UsageError)
    assert "--step = 7: is not a committed step (nearest: 2)" in str(wrong)
    assert f"DIR = {moe_model}: already exists" in str(wrong)

    done = CliRunner().invoke(readable(app), ["export", str(run), str(out), "--step", "1"])
    assert (done.exit_code, done.stdout) == (0, f"{out}\n"), done.output
    expected = tensors(filesystem.version_dir(run, 1))
    actual = tensors(out)
    assert {file.stat().st_mode for file in out.iterdir()} == {(out / "config.json").stat().st_mode}
    assert set(actual) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    AutoTokenizer.from_pretrained(out)
    _, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
