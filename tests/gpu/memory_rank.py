"""Trains a few steps on one GPU, and prints peak memory and seconds per step as JSON. The argument is a recipe."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import join
from primeslurm.trainer.policy.train_step import TrainStep
from tests.trainer.conftest import make_batch, make_timer


def main() -> None:
    """Run three steps. The first one warms up and is not timed."""
    import torch

    path = Path(sys.argv[1])
    recipe = Recipe.model_validate_json(path.read_text())
    world = join(Interrupt(), 60, recipe.trainer.memory.optimizer_offload)
    train_step = TrainStep(build(recipe, world), recipe, world)
    timer = make_timer(path.parent)
    losses = []
    for step in (1, 2, 3):
        if step == 2:
            torch.cuda.synchronize()
            began = time.monotonic()
        losses.append(train_step.train(make_batch(step, rows=1, seq_len=recipe.seq_len), timer)["loss"])
    torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / 2
    print("RESULT", json.dumps({"gb": world.peak_memory_bytes() / 1e9, "seconds": seconds, "losses": losses}))
    world.close()


if __name__ == "__main__":
    main()
