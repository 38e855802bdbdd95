"""Frozen weights: router biases and the indexers of sparse attention."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from primeslurm.recipe.sections.trainer import Checkpoint
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints import export
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.stored import checkpoints
from tests.trainer.conftest import make_batch, make_recipe, make_timer
from tests.trainer.families import BY_NAME, write


def test_glm5_training_keeps_indexers_and_biases_unchanged(world: World, tmp_path: Path) -> None:
    path = write(BY_NAME["glm_moe_dsa"], tmp_path / "model")
    recipe = make_recipe(path)

    def train_step() -> TrainStep:
        policy = build(recipe, world)
        return TrainStep(policy, recipe, world)

    saver = Checkpoints(tmp_path, 1, Checkpoint(), world, None)
    timer = make_timer(tmp_path)
    mine = train_step()
    before = {name: tensor.clone() for name, tensor in mine.policy.model.state_dict().items()}
    mine.train(make_batch(1), timer)
    saver.finish(1, mine, timer)
    after = mine.policy.model.state_dict()
    unchanged = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert unchanged == {name for name in before if ".indexer." in name or "expert_bias" in name}
    # two indexers of five tensors, three layers with experts
    assert len(unchanged) == 2 * 5 + 3

    export.export(recipe, checkpoints.step_dir(tmp_path, 1), tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model-frozen.safetensors")
    assert exported and all(".indexer." in name for name in exported)
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")

    resumed = train_step()
    assert saver.restore(resumed) == 1
    assert resumed.train(make_batch(2), timer)["loss"] == mine.train(make_batch(2), timer)["loss"]
