"""The losses against formulas written out in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from primeslurm.recipe.training import Loss
from primeslurm.trainer.logprobs import token_logprobs
from primeslurm.trainer.loss import LossFunction, Sums, Targets, cross_entropy, dppo

ROWS, LENGTH, VOCABULARY = 3, 60, 11


def make_targets(seed: int = 0) -> tuple[torch.Tensor, Targets]:
    """Random logits whose engine log-probs are far enough off that some tokens are masked on either side."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, LENGTH)
    logits = (3 * torch.randn(*shape, VOCABULARY, generator=generator)).requires_grad_()
    mask = torch.rand(shape, generator=generator) < 0.7
    targets = Targets(
        labels=torch.randint(0, VOCABULARY, shape, generator=generator),
        mask=mask,
        logprobs=torch.where(mask, -3 * torch.rand(shape, generator=generator), 0),
        advantages=torch.where(mask, torch.randn(shape, generator=generator), 0),
        temperatures=torch.where(mask, 0.5 + torch.rand(shape, generator=generator), 0),
        on_policy=torch.rand(shape, generator=generator) < 0.5,
    )
    return logits, targets


def evaluate(function: LossFunction, logits: torch.Tensor, targets: Targets) -> Sums:
    """A loss of logits: an identity for a head makes them hidden states."""
    head = torch.eye(VOCABULARY)
    scores = token_logprobs(logits, head, targets.labels, targets.temperatures, targets.mask, None)
    return function(*scores, targets)


def reference(logits: torch.Tensor, targets: Targets, config: Loss) -> dict[str, float]:
    """Token by token, in float64."""
    sums = dict.fromkeys(("loss", "off_policy_kl", "mismatch_kl", "entropy", "masked_fraction", "high", "low"), 0.0)
    for row, column in np.argwhere(targets.mask.numpy()):
        scaled = logits[row, column].detach().double().numpy() / targets.temperatures[row, column].double().item()
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        p = probabilities[targets.labels[row, column]]
        q = np.exp(targets.logprobs[row, column].double().item())
        advantage = targets.advantages[row, column].double().item()
        d = np.log(p) - np.log(q)
        high = advantage > 0 and p - q > config.mask_high
        low = advantage <= 0 and p - q < -config.mask_low
        keep = not (high or low)
        sums["loss"] += -config.adv_tau * advantage * (p / q) * keep + config.kl_tau * d**2
        sums["off_policy_kl"] += p / q - d - 1
        sums["mismatch_kl"] += (p / q - d - 1) * targets.on_policy[row, column].item()
        sums["entropy"] += -(probabilities * np.log(probabilities)).sum()
        sums["masked_fraction"] += not keep
        sums["high"] += high
        sums["low"] += low
    return sums


@pytest.mark.parametrize("config", [Loss(), Loss(mask_low=0.05, mask_high=0.1, adv_tau=2.0, kl_tau=0.1)])
def test_dppo_equals_the_formula(config: Loss) -> None:
    logits, targets = make_targets()
    expected = reference(logits, targets, config)
    assert expected["high"] > 0 and expected["low"] > 0, "the data must exercise both masks"
    sums = evaluate(dppo(config), logits, targets)
    assert sums.loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    for name in ("off_policy_kl", "mismatch_kl"):
        assert sums.metrics[name].item() == pytest.approx(expected[name], rel=1e-5)
    assert sums.metrics["on_policy_fraction"].item() == (targets.on_policy & targets.mask).sum().item()
    assert sums.metrics["entropy"].item() == pytest.approx(expected["entropy"], rel=1e-5)
    assert sums.metrics["masked_high_fraction"].item() == expected["high"]
    assert sums.metrics["masked_low_fraction"].item() == expected["low"]
    assert sums.metrics["masked_fraction"].item() == expected["masked_fraction"]


def test_masked_tokens_give_only_the_kl_gradient() -> None:
    logits, targets = make_targets()
    with torch.no_grad():
        q = torch.exp(targets.logprobs)
        p = (logits / targets.temperatures.unsqueeze(-1)).softmax(-1).gather(-1, targets.labels.unsqueeze(-1))[..., 0]
    moved = p - q
    masked = targets.mask & (((targets.advantages > 0) & (moved > 0.2)) | ((targets.advantages <= 0) & (moved < -0.2)))
    evaluate(dppo(Loss(kl_tau=0.0)), logits, targets).loss.backward()
    assert logits.grad is not None
    assert masked.any()
    assert (logits.grad[masked] == 0).all()
    assert (logits.grad[~targets.mask] == 0).all()
    assert (logits.grad[targets.mask & ~masked].abs().sum(-1) > 0).all()


def test_equal_policies_have_no_mismatch_and_the_plain_policy_gradient() -> None:
    logits, targets = make_targets()
    scaled = logits.detach() / targets.temperatures.unsqueeze(-1)
    own = scaled.log_softmax(-1).gather(-1, targets.labels.unsqueeze(-1))[..., 0]
    same = replace(targets, logprobs=own)
    sums = evaluate(dppo(Loss()), logits, same)
    assert sums.metrics["off_policy_kl"].item() == pytest.approx(0, abs=1e-5)
    assert sums.metrics["masked_fraction"].item() == 0
    assert sums.loss.item() == pytest.approx(-targets.advantages[targets.mask].sum().item(), rel=1e-5)


def test_a_micro_batch_without_trained_tokens_still_has_a_gradient() -> None:
    logits, targets = make_targets()
    nothing = replace(targets, mask=torch.zeros_like(targets.mask))
    for function in (dppo(Loss()), cross_entropy):
        logits.grad = None
        evaluate(function, logits, nothing).loss.backward()
        assert logits.grad is not None and (logits.grad == 0).all()


def test_cross_entropy_equals_torch() -> None:
    logits, targets = make_targets()
    ones = replace(targets, temperatures=torch.ones_like(targets.temperatures))
    expected = torch.nn.functional.cross_entropy(logits[targets.mask], targets.labels[targets.mask], reduction="sum")
    assert evaluate(cross_entropy, logits, ones).loss.item() == pytest.approx(expected.item(), rel=1e-6)
