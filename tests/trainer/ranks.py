"""One rank of a layout test: train on synthetic batches, and print the metrics as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed import collective_count
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_transfer.filesystem import Publisher
from primeslurm.trainer.weights.export import Encoding
from tests.trainer.conftest import make_batch, make_timer


def train(recipe: Recipe, out: Path, world: World) -> list[dict[str, float]]:
    import torch

    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    timer = make_timer(out)
    metrics = []
    for step in range(1, recipe.max_steps + 1):
        routed = recipe.trainer.router_replay
        batch = make_batch(step, policy.dp_rank, policy.dp_world, seq_len=recipe.seq_len, routed=routed)
        before = collective_count.started()
        metrics.append(train_step.train(batch, timer))
        metrics[-1]["collectives"] = collective_count.started() - before
    Publisher(policy, out, Encoding(torch.float32), 1, world).publish(recipe.max_steps)
    return metrics


def main() -> None:
    """Arguments: pairs of a recipe and an output directory."""
    world = join(Interrupt(), timeout_s=600)
    for recipe, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        for metrics in train(Recipe.model_validate_json(Path(recipe).read_text()), Path(out), world):
            print("METRICS", json.dumps(metrics), flush=True)
    world.close()


if __name__ == "__main__":
    main()
