"""A tenant's step through the service, beside the trainer's own LoRA step on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Optimizer
from primeslurm.tenants.step import TenantStep, learning_rate
from primeslurm.tenants.tinker_client import TinkerClient
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import lora
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.optimizers import optimizers
from primeslurm.trainer.optimizers.container import Optimizers
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch
from tests.trainer.conftest import make_batch, make_recipe, make_timer
from tests.trainer.tinker.conftest import Api

Change = Callable[[Batch], Batch]


def tenant_recipe(model: Path, loss: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    optimizer = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2, "max_norm": 0.05, "weight_decay": 0.1}
    trainer = {"optimizer": optimizer, "lora": {"rank": 8}, "loss": loss or {"type": "dppo"}}
    return make_recipe(model, seed=7, trainer=trainer, **sections)


def rows(batch: Batch, **change: Callable[[Any], Any]) -> Batch:
    """Return a batch whose rows have changed fields, each computed from the row."""
    return Batch(batch.info, [replace(row, **{name: of(row) for name, of in change.items()}) for row in batch.rows])


def batch_of(step: int, **change: Callable[[Any], Any]) -> Batch:
    return rows(make_batch(step), temperatures=lambda row: np.ones_like(row.temperatures), **change)


class Both:
    """The tenant's step, and the trainer's."""

    def __init__(self, recipe: Recipe, api: Api, world: World, directory: Path) -> None:
        api.http.headers["X-API-Key"] = api.key
        self.client = TinkerClient(api.http)
        model = self.client.open("test")
        self.client.create(model, 8, recipe.seed)
        self.tenant, self.trainer = TenantStep(recipe, self.client), TrainStep(build(recipe, world), recipe, world)
        self._runs, self._timer = api.service._runs, make_timer(directory)

    def train(self, batch: Batch) -> tuple[dict[str, float], dict[str, float]]:
        return self.tenant.train(batch, self._timer), self.trainer.train(batch, self._timer)

    def difference(self) -> float:
        """Return the largest difference of a parameter."""
        adapter = next(run.adapter for name, run in self._runs.items() if name.startswith(self.client.session))
        assert adapter is not None
        trained = {n: p for n, p in self.trainer.policy.model.named_parameters() if lora.is_adapter(n)}
        assert trained.keys() == adapter.parameters.keys()
        return max((lora.whole(trained[n]) - p).abs().max().item() for n, p in adapter.parameters.items())


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        ({"type": "dppo"}, {}),
        ({"type": "gspo", "average": "rollouts"}, {}),
        ({"type": "cispo"}, {"echo_weights": lambda row: (~row.mask * 0.5 * (row.token_ids % 2)).astype(np.float32)}),
    ],
    ids=lambda value: value.get("type"),
)
def test_three_steps_equal_those_of_the_trainer(
    serve: Callable[..., Api], dense_model: Path, world: World, tmp_path: Path, loss: dict[str, Any], change: Any
) -> None:
    both = Both(tenant_recipe(dense_model, loss=loss), serve(), world, tmp_path)
    for step in (1, 2, 3):
        ours, trainers = both.train(batch_of(step, **change))
        shared = ours.keys() & trainers.keys() - {"tokens_per_s"}
        assert {"loss", "off_policy_kl", "grad_norm", "skipped", "lr", "masked_fraction", "echo_loss"} <= shared
        assert {name: ours[name] for name in shared} == pytest.approx({n: trainers[n] for n in shared}, abs=1e-5)
        assert ours["grad_norm"] > 0.05  # it is clipped
        assert both.difference() < 5e-6


@pytest.mark.parametrize("advantage", [math.nan, 1e38], ids=["loss", "gradient"])
def test_step_without_a_finite_gradient_is_skipped_as_in_the_trainer(
    serve: Callable[..., Api], dense_model: Path, world: World, tmp_path: Path, advantage: float
) -> None:
    both = Both(tenant_recipe(dense_model), serve(), world, tmp_path)

    def broken(row: Any) -> Any:
        return np.where(row.mask, advantage, 0).astype(np.float32)

    for step, change in enumerate(({}, {"advantages": broken}, {}), 1):
        ours, trainers = both.train(batch_of(step, **change))
        assert ours["skipped"] == trainers["skipped"] == bool(change)
        assert both.difference() < 5e-6
    for step in (4, 5):
        both.tenant.train(batch_of(step, advantages=broken), make_timer(tmp_path))
    with pytest.raises(FloatingPointError, match="no gradient was finite in 3 consecutive steps"):
        both.tenant.train(batch_of(6, advantages=broken), make_timer(tmp_path))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3, 9])
def test_learning_rates_are_those_of_the_trainer(schedule: str, warmup: int) -> None:
    config = Optimizer.model_validate({"lr": 0.5, "schedule": schedule, "warmup_steps": warmup, "min_lr_ratio": 0.1})
    optimizer = Optimizers([torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)])
    scheduler = optimizers.schedule(config, 7, optimizer)
    for step in range(1, 8):
        assert learning_rate(config, step, 7) == pytest.approx(optimizer.lr)
        optimizer.step()
        scheduler.step()
