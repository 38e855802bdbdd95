"""One rank of the optimizers' test: trains with each of them, and resumes what one process has saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from primeslurm.trainer.checkpoint import Checkpoints
from primeslurm.trainer.interrupt import Interrupt
from primeslurm.trainer.loss import dppo
from primeslurm.trainer.parallel import build
from primeslurm.trainer.publish import Publisher
from primeslurm.trainer.step import Learner
from primeslurm.trainer.world import World, join
from tests.trainer.conftest import make_batch, make_progress, make_recipe

TYPES = ("adamw", "muon", "sgd", "sign_sgd")
RATES = {"adamw": 1e-3, "muon": 1e-3, "sgd": 1.0, "sign_sgd": 1e-4}


def train(directory: Path, model: Path, kind: str, ep: int, world: World) -> None:
    """Three steps in `directory`, with a checkpoint after the second."""
    learner, saver = prepare(directory, model, kind, ep, world)
    steps(learner, saver, directory, 0, world)


def resume(saved: Path, directory: Path, model: Path, kind: str, ep: int, world: World) -> None:
    """The third step of the run in `saved`, published in `directory`."""
    learner, saver = prepare(saved, model, kind, ep, world)
    assert saver.restore(learner) == 2
    steps(learner, None, directory, 2, world)


def prepare(directory: Path, model: Path, kind: str, ep: int, world: World) -> tuple[Learner, Checkpoints]:
    """A learner whose gradients are clipped, and what saves it."""
    trainer: dict[str, Any] = {
        "optimizer": {"type": kind, "lr": RATES[kind], "weight_decay": 0.1, "max_norm": 0.1, "schedule": "cosine"},
        "parallelism": {"ep": ep},
    }
    recipe = make_recipe(model, trainer=trainer, checkpoint={"interval": 2})
    policy = build(recipe, world)
    learner = Learner(policy, recipe.trainer.optimizer, recipe.max_steps, dppo(recipe.trainer.loss), world)
    return learner, Checkpoints(directory, 1, recipe.checkpoint, world, None)


def steps(learner: Learner, saver: Checkpoints | None, directory: Path, done: int, world: World) -> None:
    """Train up to step 3 and publish."""
    import torch

    progress = make_progress(directory)
    policy = learner.policy
    for step in range(done + 1, 4):
        metrics = learner.train(make_batch(step, policy.dp_rank, policy.dp_world), progress)
        assert metrics["grad_norm"] > 0.1, "clipping must be tested"
        if saver is not None:
            saver.after(step, learner, progress)
    Publisher(policy, directory, torch.float32, 1, world).publish(3)


def main() -> None:
    """Arguments: model, root directory of the runs."""
    model, root = Path(sys.argv[1]), Path(sys.argv[2])
    world = join(Interrupt(), patience_s=60)
    for kind in TYPES:
        train(root / "two" / kind, model, kind, 2, world)
        resume(root / "one" / kind, root / "one-two" / kind, model, kind, 2, world)
    world.close()


if __name__ == "__main__":
    main()
