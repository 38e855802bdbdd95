"""A non-finite gradient skips the update; three in a row end the run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from primeslurm.recipe.sections.losses import DppoLoss
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.loss import LossFunction, cross_entropy, from_recipe
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire import exit_codes
from primeslurm.wire.batches.batch import Batch
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.link.messages import StepDone
from primeslurm.wire.stored import checkpoints
from tests.trainer.conftest import finish, make_batch, make_recipe, make_timer
from tests.trainer.loops.test_rl import FakeOrchestrator, Run

LOSSES = [pytest.param(from_recipe(DppoLoss()), id="rl"), pytest.param(cross_entropy, id="sft")]


def poisoned(batch: Batch) -> Batch:
    """Return the batch with an advantage that makes the gradient infinite."""
    row = batch.rows[0]
    token = np.flatnonzero(row.mask & (row.positions > 0))[0]
    row.advantages[token] = np.inf
    return batch


def train_step(model: Path, world: World, loss: LossFunction) -> TrainStep:
    recipe = make_recipe(model, max_steps=8, trainer={"optimizer": {"lr": 1e-3, "schedule": "linear"}})
    return TrainStep(build(recipe, world), recipe, world, loss=loss)


def weights(made: TrainStep) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in made.policy.model.state_dict().items()}


def same(before: dict[str, torch.Tensor], made: TrainStep) -> bool:
    return all(torch.equal(before[name], value) for name, value in made.policy.model.state_dict().items())


def test_step_without_finite_gradient_changes_only_the_schedule(moe_model: Path, world: World, tmp_path: Path) -> None:
    made, timer = train_step(moe_model, world, from_recipe(DppoLoss())), make_timer(tmp_path)
    before = weights(made)
    skipped = made.train(poisoned(make_batch(1)), timer)
    assert skipped["skipped"] == 1 and not math.isfinite(skipped["grad_norm"])
    assert same(before, made)
    metrics = made.train(make_batch(2), timer)
    assert metrics["skipped"] == 0 and math.isfinite(metrics["grad_norm"])
    assert not same(before, made)

    other = train_step(moe_model, world, from_recipe(DppoLoss()))
    other.scheduler.step()
    expected = other.train(make_batch(2), timer)
    assert metrics["lr"] == expected["lr"] < skipped["lr"], "a skipped step counts as a step"
    assert same(weights(other), made), "nothing of the poisoned batch is left in gradients or states"


def test_consecutive_skipped_steps_end_training(moe_model: Path, world: World, tmp_path: Path) -> None:
    made, timer = train_step(moe_model, world, from_recipe(DppoLoss())), make_timer(tmp_path)
    for step in (1, 2, 4, 5):
        assert made.train(poisoned(make_batch(step)), timer)["skipped"] == 1
        if step == 2:
            assert made.train(make_batch(3), timer)["skipped"] == 0
    before = weights(made)
    with pytest.raises(FloatingPointError, match=r"the gradient norm is (nan|inf) in step 6: .* 3 consecutive steps"):
        made.train(poisoned(make_batch(6)), timer)
    assert same(before, made)


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_weights_end_training(loss: LossFunction, moe_model: Path, world: World, tmp_path: Path) -> None:
    made, timer = train_step(moe_model, world, loss), make_timer(tmp_path)
    with torch.no_grad():
        next(iter(made.policy.model.parameters())).fill_(math.nan)
    for step in (1, 2):
        assert made.train(make_batch(step), timer)["skipped"] == 1
    with pytest.raises(FloatingPointError, match="the gradient norm is nan in step 3"):
        made.train(make_batch(3), timer)


def test_all_ranks_skip_a_step_together(moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's rows of steps 2 and 4 to 6 have no finite gradient."""

    def encode(batch: Batch) -> list[Frame]:
        bad = batch.info.step in (2, 4, 5, 6) and batch.info.dp_rank == 1
        return original(poisoned(batch) if bad else batch)

    original = Batch.encode
    monkeypatch.setattr(Batch, "encode", encode)
    orchestrator = FakeOrchestrator()
    run = Run(tmp_path, make_recipe(moe_model, max_steps=9, checkpoint={"interval": 5, "keep": 2}), orchestrator)
    try:
        printed = finish(run.start(size=2), code=exit_codes.UNRECOVERABLE)
    finally:
        orchestrator.close()
    assert all("FloatingPointError: the gradient norm is" in text for text in printed)
    done = {request.step: request.metrics for request in orchestrator.of(StepDone)}
    assert {step: metrics["skipped"] for step, metrics in done.items()} == {1: 0, 2: 1, 3: 0, 4: 1, 5: 1}
    kinds = run.events(1)
    assert kinds.count("step_skipped") == 3 and kinds[-1] == "stop"
    assert checkpoints.committed(tmp_path) == [5], "the batches of skipped steps are used up"
