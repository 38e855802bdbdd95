"""Adapters on one model: log-probabilities, gradients, steps and checkpoints, against the trainer and each alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primeslurm.recipe.sections.losses import CispoLoss, GrpoClipLoss
from primeslurm.recipe.sections.tenant import ALPHA
from primeslurm.tinker.backbone import Adapter, Backbone, Pass, _scale
from primeslurm.tinker.losses import per_token
from primeslurm.tinker.requests import AdamParams, Config, Datum, LoraConfig, RequestError
from primeslurm.tinker.rows import fit
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components import lora
from primeslurm.trainer.components.loss import Documents, importance, surrogate
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import make_recipe
from tests.trainer.tinker.conftest import make_data, score

EXACT = 5e-6
RATE = AdamParams(learning_rate=1e-2)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")


def train(backbone: Backbone, adapter: Adapter, *steps: int, loss: str = "cross_entropy") -> list[float]:
    losses = []
    for step in steps:
        losses.append(score(backbone, adapter, make_data(step, 5, 9, loss=loss), loss, {}, backward=True)[1])
        adapter.step(RATE)
    return losses


def same(one: Adapter, other: Adapter, tolerance: float = EXACT) -> bool:
    pairs = ((one.parameters[name], other.parameters[name]) for name in one.parameters | other.parameters)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


def test_passes_equal_the_trainers(backbone: Backbone, dense_model: Path, world: World) -> None:
    policy = build(make_recipe(dense_model, trainer={"lora": {"rank": 8, "alpha": ALPHA}}), world)
    adapter = backbone.adapter(LoraConfig(rank=8, seed=0))
    slots = {name: p for name, p in policy.model.named_parameters() if lora.is_adapter(name)}
    for name, slot in slots.items():
        if name.endswith(lora.A):
            assert torch.equal(lora.whole(slot), adapter.parameters[name]), "the same seed draws the same values"
        else:
            with torch.no_grad():
                adapter.parameters[name].normal_(std=0.02)
                slot.to_local().copy_(adapter.parameters[name])
    data = make_data(1, 6, 11)
    logprobs, loss = score(backbone, adapter, data, "cross_entropy", {}, backward=True)
    total = torch.zeros(())
    for datum, scores in zip(data, logprobs, strict=True):
        logits = policy.logits(torch.from_numpy(datum.tokens)[None].long(), torch.arange(len(datum.tokens))[None])[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        expected = logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        assert torch.allclose(torch.from_numpy(scores), expected, rtol=0, atol=EXACT)
        total = total - (expected * torch.from_numpy(datum.inputs["weights"])).sum()
    assert loss == pytest.approx(total.item(), abs=1e-4)
    total.backward()  # type: ignore[no-untyped-call]
    for name, parameter in adapter.parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, lora.whole(slots[name].grad), rtol=1e-4, atol=EXACT)


RANKS = (4, 16, 8, 1)


def make_pass(adapter: Adapter, number: int, step: int) -> Pass:
    """Return one of a client's passes, whose loss and sequences depend on the client's number."""
    loss = LOSSES[number % len(LOSSES)]
    lengths = (5, 9, 3)[: 1 + number % 3]
    return Pass(adapter, make_data(10 * number + step, *lengths, loss=loss), loss, {}, backward=True)


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("kind", ["backbone", "moe_backbone"])
def test_clients_of_shared_passes_equal_each_alone(kind: str, count: int, request: pytest.FixtureRequest) -> None:
    backbone: Backbone = request.getfixturevalue(kind)

    def adapter(number: int) -> Adapter:
        layers = {"train_attn": number % 5 != 3, "train_mlp": number % 5 != 2}
        return backbone.adapter(LoraConfig(rank=RANKS[number % 4], seed=number, **layers))

    together, alone = ([adapter(number) for number in range(count)] for _ in range(2))
    for step in range(4):
        # Clients come and go: each misses one of the four steps.
        present = [number for number in range(count) if count == 1 or number % 4 != step]
        shared = backbone.score([make_pass(together[number], number, step) for number in present])
        if step == 0:  # forward passes in the same batch change no gradient
            forward = [replace(make_pass(together[number], number, 9), backward=False) for number in present]
            backbone.score([*forward, make_pass(adapter(99), 99, step)])
        for number, (logprobs, loss) in zip(present, shared, strict=True):
            ((expected, expected_loss),) = backbone.score([make_pass(alone[number], number, step)])
            assert loss == pytest.approx(expected_loss, abs=1e-5)
            for one, other in zip(logprobs, expected, strict=True):
                assert one == pytest.approx(other, abs=EXACT)
            gradients, expected_gradients = (
                torch.cat([p.grad.flatten() for p in each[number].parameters.values()])  # type: ignore[union-attr]
                for each in (together, alone)
            )
            largest = expected_gradients.abs().max().item()
            torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=EXACT * largest)
            # With a tiny eps, Adam divides gradients near zero, and their rounding, by almost nothing.
            for each in (together, alone):
                each[number].step(AdamParams(learning_rate=1e-3 * (1 + step) / (1 + number % 3), eps=1e-3))
            assert same(together[number], alone[number])
    assert not same(together[0], adapter(0), 1e-3)


# A broken client's tokens go to other experts. This moves the rows of experts' products, and thereby their rounding.
@pytest.mark.parametrize(("kind", "tolerance"), [("backbone", 0.0), ("moe_backbone", EXACT)])
def test_nan_of_one_client_does_not_reach_another(kind: str, tolerance: float, request: pytest.FixtureRequest) -> None:
    backbone: Backbone = request.getfixturevalue(kind)
    results = []
    for broken in (False, True):
        adapters = [backbone.adapter(LoraConfig(rank=4, seed=number)) for number in range(4)]
        if broken:
            next(iter(adapters[1].parameters.values())).data.fill_(torch.nan)
        scores = backbone.score([make_pass(each, number, 0) for number, each in enumerate(adapters)])
        assert all(np.isnan(logprobs).all() == broken for logprobs in scores[1][0])
        logprobs = [torch.from_numpy(each) for number in (0, 2, 3) for each in scores[number][0]]
        results.append(logprobs + [p.grad for number in (0, 2, 3) for p in adapters[number].parameters.values()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_gradients_of_several_passes_add_up(backbone: Backbone) -> None:
    apart, together = (backbone.adapter(LoraConfig(rank=4, seed=1)) for _ in range(2))
    data = make_data(1, 5, 9)
    for datum in data:
        score(backbone, apart, [datum], "cross_entropy", {}, backward=True)
        score(backbone, apart, [datum], "cross_entropy", {}, backward=False)
    score(backbone, together, data, "cross_entropy", {}, backward=True)
    for name, parameter in apart.parameters.items():
        torch.testing.assert_close(parameter.grad, together.parameters[name].grad, rtol=1e-4, atol=1e-5)


def test_failure_while_gradients_are_added_changes_none(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = [backbone.adapter(LoraConfig(rank=4, seed=number)) for number in range(2)]
    parameters = [parameter for each in adapters for parameter in each.parameters.values()]

    def out_of_memory(name: str, parameter: torch.Tensor) -> float:
        if parameter is parameters[-1]:
            raise torch.OutOfMemoryError
        return _scale(name, parameter)

    for step in range(2):  # the second pass adds to gradients
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        passes = [make_pass(each, number, step) for number, each in enumerate(adapters)]
        with monkeypatch.context() as patch:
            patch.setattr("primeslurm.tinker.backbone._scale", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                backbone.score(passes)
        for parameter, gradient in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
        backbone.score(passes)


def test_passes_fit_by_tokens_and_ranks() -> None:
    assert fit([[4096], [4096]], [8, 8]) and not fit([[4096], [4097]], [8, 8])
    assert fit([[8]] * 64, [1] * 64) and not fit([[8]] * 65, [1] * 65)
    assert fit([[8]] * 2, [256, 1]) and not fit([[8]] * 3, [256, 1, 1])
    assert not fit([[8]] * 2, [257, 1])
    assert fit([[5000], [5000]], [8, 8], dp=2) and not fit([[5000]] * 3, [8] * 3, dp=2)
    assert fit([[5000]] * 3, [8] * 3, cp=2) and fit([[9000]] * 2, [8] * 2, dp=2)


@pytest.mark.parametrize("trains", ["attn", "mlp"])
def test_only_chosen_layers_are_trained(backbone: Backbone, trains: str) -> None:
    adapter = backbone.adapter(LoraConfig(rank=4, train_mlp=trains == "mlp", train_attn=trains == "attn"))
    train(backbone, adapter, 1)
    assert adapter.parameters and all(("feed_forward" in name) == (trains == "mlp") for name in adapter.parameters)


def test_resumed_training_equals_uninterrupted(backbone: Backbone, tmp_path: Path) -> None:
    adapter, resumed, weights_only = (backbone.adapter(LoraConfig(rank=4, seed=seed)) for seed in (1, 2, 3))
    train(backbone, adapter, 1, 2)
    adapter.save(tmp_path / "state", optimizer=True)
    resumed.load(tmp_path / "state", optimizer=True)
    weights_only.load(tmp_path / "state", optimizer=False)
    assert same(adapter, weights_only, 0)
    losses = train(backbone, adapter, 3, 4)
    assert train(backbone, resumed, 3, 4) == losses and same(adapter, resumed, 0)
    train(backbone, weights_only, 3, 4)
    assert not same(adapter, weights_only, 1e-4), "its optimizer was reset"
    adapter.save(tmp_path / "sampler", optimizer=False)
    with pytest.raises(RequestError, match="without an optimizer"):
        resumed.load(tmp_path / "sampler", optimizer=True)


def test_several_targets_per_token(backbone: Backbone) -> None:
    adapter, (datum,) = backbone.adapter(LoraConfig(rank=4, seed=1)), make_data(1, 6)
    columns = [make_data(seed, 6)[0].inputs for seed in (2, 3)]
    several = {name: torch.stack([torch.from_numpy(c[name]) for c in columns], 1).numpy() for name in columns[0]}
    (together,), loss = score(backbone, adapter, [Datum(datum.tokens, several)], "cross_entropy", {}, backward=False)
    total = 0.0
    for index, inputs in enumerate(columns):
        (alone,), term = score(backbone, adapter, [Datum(datum.tokens, inputs)], "cross_entropy", {}, backward=False)
        assert together[:, index] == pytest.approx(alone, abs=EXACT)
        total += term
    assert together.shape == (6, 2) and loss == pytest.approx(total, abs=1e-4)


def test_step_without_a_finite_gradient_changes_nothing(backbone: Backbone) -> None:
    adapter, before = (backbone.adapter(LoraConfig(rank=4, seed=1)) for _ in range(2))
    score(backbone, adapter, make_data(1, 5), "cross_entropy", {}, backward=True)
    next(iter(adapter.parameters.values())).grad.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="gradient norm is nan"):
        adapter.step(RATE)
    assert same(adapter, before, 0) and all(p.grad is None for p in adapter.parameters.values())


@pytest.mark.parametrize(
    ("loss", "config", "settings"),
    [
        ("ppo", {}, GrpoClipLoss(clip_low=0.2, clip_high=0.2, ratio_cap=None)),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}, GrpoClipLoss(clip_low=0.1, clip_high=0.5)),
        ("cispo", {}, CispoLoss(max_ratio=4.0)),
        ("cispo", {"clip_low_threshold": 0.5}, CispoLoss(min_ratio=0.5, max_ratio=4.0)),
    ],
)
def test_losses_equal_the_trainers(loss: str, config: Config, settings: GrpoClipLoss | CispoLoss) -> None:
    generator = torch.Generator().manual_seed(0)
    engine, change, advantages = (torch.randn(64, generator=generator) for _ in range(3))
    gradients = []
    for compute in ("tinker", "trainer"):
        logprobs = (engine - 1.5 + change).requires_grad_()
        if compute == "tinker":
            terms = per_token(loss, config, logprobs, {"logprobs": engine - 1.5, "advantages": advantages})
        else:
            weights = importance(settings, logprobs, engine - 1.5, Documents(torch.zeros(64), 1))
            terms = surrogate(settings, logprobs, weights, advantages)
        terms.sum().backward()  # type: ignore[no-untyped-call]
        gradients.append((terms.detach(), logprobs.grad))
    torch.testing.assert_close(*gradients)
