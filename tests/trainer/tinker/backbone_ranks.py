"""One rank of the backbone test: train adapters of several clients in several layouts, and save the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from primeslurm.recipe.sections.trainer import Parallelism
from primeslurm.tinker.backbone import Adapter, Backbone, Pass
from primeslurm.tinker.requests import AdamParams, LoraConfig, RequestError
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.distributed.world import join
from tests.trainer.tinker.conftest import make_data

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
RANKS = (4, 16, 8, 1)
# Clients of each step. One comes later, one leaves, and one misses a step.
TOGETHER = ((0, 1, 2), (0, 2, 3), (0, 1, 3))
ALONE = ((0,), (0,), (0,))
# Tokens of a rank in one batch, so that passes have several batches.
BATCH_TOKENS = 9
Results = dict[str, torch.Tensor]
"""Log-probabilities, losses, gradients and parameters, by client and its step."""


def make_adapter(backbone: Backbone, number: int) -> Adapter:
    layers = {"train_attn": number % 4 != 3, "train_mlp": number % 4 != 2}
    return backbone.adapter(LoraConfig(rank=RANKS[number], seed=number, **layers))


def make_pass(adapter: Adapter, number: int, step: int, **changes: Any) -> Pass:
    loss = LOSSES[number]
    data = make_data(10 * number + step, *(5, 9, 3, 7)[: 1 + number], loss=loss)
    return replace(Pass(adapter, data, loss, {}, backward=True), **changes)


def train(backbone: Backbone, clients_of_steps: Sequence[Sequence[int]]) -> Results:
    """Train the clients of each step in shared passes."""
    adapters, results = dict[int, Adapter](), Results()
    for clients in clients_of_steps:
        steps = {number: sum(f"{number} {step} loss" in results for step in range(3)) for number in clients}
        for number in clients:
            adapters.setdefault(number, make_adapter(backbone, number))
        passes = [make_pass(adapters[number], number, steps[number]) for number in clients]
        for number, (logprobs, loss) in zip(clients, backbone.score(passes), strict=True):
            name, parameters = f"{number} {steps[number]}", adapters[number].parameters.values()
            results[f"{name} loss"] = torch.tensor(loss)
            results[f"{name} logprobs"] = torch.cat([torch.from_numpy(each) for each in logprobs])
            gradient = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
            results[f"{name} gradient"] = gradient / gradient.abs().max()
            # Adam divides by the gradient, so that a small epsilon would make updates of rounding errors.
            rate = AdamParams(learning_rate=1e-3 * (1 + steps[number]) / (1 + number), eps=1e-3)
            results[f"{name} norm"] = torch.tensor(adapters[number].step(rate)["grad_norm"])
            results[f"{name} parameters"] = torch.cat([p.detach().flatten() for p in parameters])
    return results


def disturb(backbone: Backbone) -> Results:
    """Compute a pass beside a broken client and a forward pass, after a pass that was stopped between batches."""
    good, broken = make_adapter(backbone, 3), make_adapter(backbone, 0)
    next(iter(broken.parameters.values())).data.fill_(torch.nan)
    checks = iter([None, RequestError("session_id", "", "has ended")])

    def check() -> None:
        if error := next(checks):
            raise error

    with pytest.raises(RequestError, match="has ended"):
        backbone.score([make_pass(good, 3, 0, check=check), make_pass(broken, 0, 0)])
    assert good.parameters and all(p.grad is None for p in good.parameters.values())
    forward = make_pass(make_adapter(backbone, 2), 2, 0, backward=False)
    passes = [make_pass(broken, 0, 0), make_pass(good, 3, 0), forward]
    (lost, _), (logprobs, _), _ = backbone.score(passes)
    assert torch.from_numpy(lost[0]).isnan().all()
    assert all(p.grad is None for p in forward.adapter.parameters.values())
    gradient = torch.cat([p.grad.flatten() for p in good.parameters.values()])  # type: ignore[union-attr]
    joined = torch.cat([torch.from_numpy(each) for each in logprobs])
    return {"logprobs": joined, "gradient": gradient / gradient.abs().max()}


def main() -> None:
    """Arguments: triples of a model, a layout (JSON) and a file for the results."""
    world = join(Interrupt(), timeout_s=600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("primeslurm.tinker.rows.BATCH_TOKENS", BATCH_TOKENS)
        for model, layout, out in zip(*(sys.argv[first::3] for first in (1, 2, 3)), strict=True):
            backbone = Backbone(model, 16, world, Parallelism(**json.loads(layout)))
            if world.is_main:
                results = {"together": train(backbone, TOGETHER), "alone": train(backbone, ALONE)}
                torch.save(results | {"disturbed": disturb(backbone)}, Path(out))
                backbone.ranks.close()
            else:
                backbone.ranks.follow()
    world.close()


if __name__ == "__main__":
    main()
