"""One rank of the test of late gradients: the first image of a trained encoder comes after a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.optimizers import host_states
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch, BatchInfo
from primeslurm.wire.batches.frames import Float32, Int32
from primeslurm.wire.batches.inline_images import ImageSpan
from tests.trainer.conftest import make_batch, make_recipe, make_timer
from tests.trainer.image_rows import DOCUMENTS, MERGE, packed

LR = {"adamw": 1e-3, "muon": 1e-3, "sgd": 0.1}
"""Learning rates of the optimizers with state."""
State = dict[str, torch.Tensor]


class Drawn(ImageReader):
    """An image reader for the images of `packed`, which are named by number."""

    def __init__(self) -> None:
        _, images = packed(DOCUMENTS)
        assert images is not None
        self._pixels = np.split(images.pixels, np.cumsum(images.grids.prod(1))[:-1])
        self._grids = images.grids

    def read(self, image: ImageSpan) -> tuple[Float32, Int32]:
        return self._pixels[int(image.source)], self._grids[int(image.source)]


def batch_with_images(step: int, dp_rank: int, dp_world: int) -> Batch:
    """Return a row with images, the same for each rank."""
    row, images = packed(DOCUMENTS)
    assert images is not None
    ends = images.starts + images.grids.prod(1) // MERGE**2
    spans = tuple(ImageSpan(str(i), int(s), int(e)) for i, (s, e) in enumerate(zip(images.starts, ends, strict=True)))
    advantages = np.random.default_rng(step).normal(size=len(row.mask)).astype(np.float32) * row.mask
    logprobs = np.where(row.mask, -4.5, 0).astype(np.float32)
    row = replace(row, images=spans, advantages=advantages, logprobs=logprobs)
    tokens = int((row.mask & (row.positions != 0)).sum()) * dp_world
    return Batch(BatchInfo(step=step, dp_rank=dp_rank, dp_world=dp_world, loss_tokens=tokens, has_images=True), [row])


class Run:
    """A run that trains the vision encoder and saves each step."""

    def __init__(self, directory: Path, model: Path, kind: str, host: bool, world: World) -> None:
        recipe = make_recipe(
            model,
            model={"path": str(model), "dtype": "float32", "vlm": {"freeze_vision_encoder": False}},
            trainer={
                "optimizer": {"type": kind, "lr": LR[kind], "weight_decay": 0.1},
                "memory": {"optimizer_state_offload": host},
            },
            checkpoint={"interval": 1},
        )
        policy = build(recipe, world)
        self.train_step = TrainStep(policy, recipe, world, Drawn())
        self.saver = Checkpoints(directory, 1, recipe.checkpoint, world, None)
        self._directory = directory

    def text(self, step: int) -> None:
        policy = self.train_step.policy
        self.train_step.train(make_batch(step, policy.dp_rank, policy.dp_world), make_timer(self._directory))

    def save(self, step: int) -> None:
        self.saver.after(step, self.train_step, make_timer(self._directory))

    def images(self, step: int) -> None:
        policy = self.train_step.policy
        self.train_step.train(batch_with_images(step, policy.dp_rank, policy.dp_world), make_timer(self._directory))

    def state(self) -> State:
        everything = dict(self.train_step.policy.model.named_parameters()) | self.train_step.optimizer.state_dict()
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in everything.items()
            if isinstance(value, torch.Tensor)
        }


def check(root: Path, model: Path, kind: str, host: bool, world: World) -> None:
    """Assert that a run that resumes before its first image matches an uninterrupted run bit for bit."""
    case = f"{kind}{'-host' if host else ''}-{world.size}"
    run = Run(root / case, model, kind, host, world)
    start = run.state()
    run.text(1)
    run.save(1)
    run.images(2)
    run.text(3)
    expected = run.state()
    encoder = [name for name in expected if name.startswith("vision.")]
    assert any(not torch.equal(expected[name], start[name]) for name in encoder), "the encoder must be trained"

    for where in (host, not host):
        resumed = Run(root / case, model, kind, where, world)
        assert resumed.saver.restore(resumed.train_step) == 1
        resumed.images(2)
        resumed.text(3)
        actual = resumed.state()
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual[name], value), (where, name)

    # Restoring into a run that has trained on images discards that training.
    run.saver = Run(root / case, model, kind, host, world).saver
    assert run.saver.restore(run.train_step) == 1
    run.images(2)
    run.text(3)
    for name, value in run.state().items():
        assert torch.equal(value, expected[name]), ("restored in place", name)


def main() -> None:
    model, root = Path(sys.argv[1]), Path(sys.argv[2])
    world = join(Interrupt(), timeout_s=600)
    host_states.STATE_CHUNK_BYTES = 8192  # the model is small, and has to be several pieces
    check(root, model, "adamw", True, world)
    world.close()


if __name__ == "__main__":
    main()
