"""One rank of a layout test: train on synthetic batches, and print the metrics of each step as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from primeslurm.recipe import Recipe
from primeslurm.trainer.encoding import Encoding
from primeslurm.trainer.interrupt import Interrupt
from primeslurm.trainer.loss import dppo
from primeslurm.trainer.parallel import build
from primeslurm.trainer.progress import Progress
from primeslurm.trainer.publish import Publisher
from primeslurm.trainer.step import Learner
from primeslurm.trainer.world import join
from primeslurm.wire.journal import Journal
from tests.trainer.conftest import make_batch


def main() -> None:
    """Arguments: recipe, directory to publish the trained policy in."""
    import torch

    recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    world = join(Interrupt(), patience_s=60)
    policy = build(recipe, world)
    learner = Learner(policy, recipe.trainer.optimizer, recipe.max_steps, dppo(recipe.trainer.loss), world)
    progress = Progress(Journal(out, f"rank-{world.rank}"), record=False)
    for step in range(1, recipe.max_steps + 1):
        batch = make_batch(step, policy.dp_rank, policy.dp_world, seq_len=recipe.seq_len)
        print("METRICS", json.dumps(learner.train(batch, progress)), flush=True)
    Publisher(policy, out, Encoding(torch.float32), 1, world).publish(recipe.max_steps)
    world.close()


if __name__ == "__main__":
    main()
