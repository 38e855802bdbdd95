"""A rank that trains, publishes and saves in a loop, in a layout with many process groups. The test stops ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from primeslurm.recipe import Recipe
from primeslurm.records import heartbeats
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import join
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from tests.trainer.conftest import make_batch, make_timer


def main() -> None:
    """Arguments: recipe, run directory, path of the heartbeat page in /proc."""
    recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text())
    run, pages = Path(sys.argv[2]), sys.argv[3].split(",")
    page = os.open(pages[int(os.environ["RANK"])], os.O_RDWR)
    os.environ[heartbeats.VARIABLE] = str(page)  # as an agent hands it down
    torch.set_num_threads(1)
    world = join(Interrupt(), timeout_s=1800)
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    timer = make_timer(run)
    saver = Checkpoints(run, 1, recipe.checkpoint, world, None)
    publisher = Publisher(policy, run, Encoding(torch.float32), 1, world)
    for step in range(1, recipe.max_steps + 1):
        timer.step = step
        with timer.phase("wait"):
            world.decide(0)
        train_step.train(make_batch(step, policy.dp_rank, policy.dp_world, rows=8, seq_len=recipe.seq_len), timer)
        with timer.phase("publish"):
            publisher.publish(step)
        saver.after(step, train_step, timer)
    world.close()


if __name__ == "__main__":
    main()
