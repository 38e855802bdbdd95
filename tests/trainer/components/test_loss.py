"""The losses against formulas in plain numpy and float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.recipe.sections.losses import CustomLoss, DppoLoss, IpoLoss
from primeslurm.trainer.components.logprobs import token_logprobs
from primeslurm.trainer.components.loss import Documents, LossFunction, Sums, Targets, cross_entropy, from_recipe

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ROWS, LENGTH, VOCABULARY = 3, 60, 11
LENGTHS = (31, 20, 9)
"""Lengths of the documents of each row."""


def make_targets(seed: int = 0) -> tuple[torch.Tensor, Targets, torch.Tensor]:
    """Return random logits, targets and the mask of trained tokens. Trust regions mask some tokens on either side."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, LENGTH)
    logits = (3 * torch.randn(*shape, VOCABULARY, generator=generator)).requires_grad_()
    mask = torch.rand(shape, generator=generator) < 0.7
    targets = Targets(
        labels=torch.randint(0, VOCABULARY, shape, generator=generator),
        logprobs=torch.where(mask, -3 * torch.rand(shape, generator=generator), 0),
        advantages=torch.where(mask, torch.randn(shape, generator=generator), 0),
        temperatures=torch.where(mask, 0.5 + torch.rand(shape, generator=generator), 0),
        on_policy=torch.rand(shape, generator=generator) < 0.5,
        ref_logprobs=torch.where(mask, -3 * torch.rand(shape, generator=generator), 0),
        documents=Documents.of(torch.cat([torch.arange(n) for n in LENGTHS]).expand(shape)),
    )
    return logits, targets, mask


def evaluate(function: LossFunction, logits: torch.Tensor, targets: Targets, mask: torch.Tensor) -> Sums:
    """Evaluate a loss of logits, with an identity as the head."""
    head, trained = torch.eye(VOCABULARY), targets.apply(lambda tensor: tensor[mask])
    places = mask.flatten().nonzero().squeeze(1)
    return function(*token_logprobs(logits, head, trained.labels, trained.temperatures, places, None), trained)


def reference(
    logits: torch.Tensor, targets: Targets, mask: torch.Tensor, config: DppoLoss | IpoLoss
) -> tuple[dict[str, float], torch.Tensor]:
    """Return sums over tokens in float64, and the gradient of the loss with respect to the logits."""
    sums = dict.fromkeys(
        ("off_policy_kl", "mismatch_kl", "importance_ratio", "entropy", "high", "low", "ref_kl", "capped"), 0.0
    )
    exact = logits.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, column in np.argwhere(mask.numpy()):
        distribution = (exact[row, column] / targets.temperatures[row, column].double()).softmax(-1)
        p = distribution[targets.labels[row, column]]
        log_q = targets.logprobs[row, column].double()
        q = log_q.exp()
        d = p.log() - log_q
        advantage = targets.advantages[row, column].item()
        moved = (p - q).item()
        high, low = outside(config, advantage, moved)
        keep = 0.0 if high or low else 1.0
        weight = p / q
        if config.ratio_cap is not None and weight > config.ratio_cap:
            weight = config.ratio_cap * p / p.detach()  # the gradient of cap * log p
            sums["capped"] += 1
        total = total - config.advantage_coef * advantage * weight * keep + config.kl_tau * d**2
        towards = targets.ref_logprobs[row, column].double() - p.log()
        towards = towards - (towards - towards.clamp(-15, 15)).detach()
        ref_kl = weight * (towards.exp() - 1 - towards)
        sums["ref_kl"] += ref_kl.item()
        if config.ref_kl and not any(outside(config, towards.item(), moved)):
            total = total + config.ref_kl * ref_kl
        kl = (p / q - d - 1).item()
        sums["off_policy_kl"] += kl
        sums["mismatch_kl"] += kl * targets.on_policy[row, column].item()
        sums["importance_ratio"] += (p / q).item()
        sums["entropy"] -= (distribution * distribution.log()).sum().item()
        sums["high"] += high
        sums["low"] += low
    total.backward()
    assert exact.grad is not None
    return sums | {"loss": total.item()}, exact.grad


def outside(config: DppoLoss | IpoLoss, advantage: float, moved: float) -> tuple[bool, bool]:
    """Return whether a probability rose, or fell, out of the trust region."""
    if isinstance(config, DppoLoss):
        return advantage > 0 and moved > config.mask_high, advantage <= 0 and moved < -config.mask_low
    return moved > config.threshold, moved < -config.threshold


@pytest.mark.parametrize(
    "config",
    [
        DppoLoss(),
        DppoLoss(mask_low=0.05, mask_high=0.1, advantage_coef=2.0, kl_tau=0.1),
        IpoLoss(),
        IpoLoss(threshold=0.05, advantage_coef=0.5, kl_tau=0.01),
        DppoLoss(ref_kl=0.3),
        IpoLoss(ref_kl=2.0),
        DppoLoss(ratio_cap=None, ref_kl=0.3),
        IpoLoss(ratio_cap=2.0, ref_kl=0.3),
    ],
    ids=lambda config: f"{config.type}-{config.kl_tau}-{config.ref_kl}-{config.ratio_cap}",
)
def test_policy_gradients_match_the_formula(config: DppoLoss | IpoLoss) -> None:
    logits, targets, mask = make_targets()
    expected, gradient = reference(logits, targets, mask, config)
    assert expected["high"] > 0 and expected["low"] > 0, "the data must exercise both masks"
    sums = evaluate(from_recipe(config), logits, targets, mask)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), gradient, atol=1e-5, rtol=1e-4)
    for name in ("loss", "off_policy_kl", "mismatch_kl", "importance_ratio", "entropy"):
        assert sums.metrics[name].item() == pytest.approx(expected[name], rel=1e-5), name
    assert sums.metrics["on_policy_fraction"].item() == (targets.on_policy & mask).sum().item()
    assert sums.metrics["masked_high_fraction"].item() == expected["high"]
    assert sums.metrics["masked_low_fraction"].item() == expected["low"]
    assert sums.metrics["masked_fraction"].item() == expected["high"] + expected["low"]
    assert sums.metrics["capped_fraction"].item() == expected["capped"]
    assert expected["capped"] > 0 or config.ratio_cap != 2
    if config.ref_kl:
        assert sums.metrics["ref_kl"].item() == pytest.approx(expected["ref_kl"], rel=1e-5)


def test_teacher_kl_and_its_gradient_are_unbiased() -> None:
    """The expectation over all tokens of a vocabulary equals KL(trainer || teacher)."""
    generator = torch.Generator().manual_seed(1)
    trainer, engine, teacher = (torch.randn(VOCABULARY, generator=generator).double() for _ in range(3))
    trainer.requires_grad_()
    q = engine.softmax(0)
    every = torch.arange(VOCABULARY)[None]
    shape = (1, VOCABULARY)
    targets = Targets(
        labels=every,
        logprobs=q.log()[None],
        advantages=torch.zeros(shape),
        temperatures=torch.ones(shape),
        on_policy=torch.zeros(shape, dtype=torch.bool),
        ref_logprobs=teacher.log_softmax(0)[None],
        documents=Documents.of(torch.zeros(shape)),
    )
    function = from_recipe(DppoLoss(kl_tau=0.0, ref_kl=1.0, mask_low=9.0, mask_high=9.0, ratio_cap=None))

    def of_token(token: int) -> torch.Tensor:
        one = targets.apply(lambda tensor: tensor[every == token])
        return function(trainer.log_softmax(0)[token][None], torch.zeros(1), one).loss

    mean = sum(q[token] * of_token(token) for token in range(VOCABULARY))
    p = trainer.log_softmax(0)
    exact = (p.exp() * (p - teacher.log_softmax(0))).sum()
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(torch.autograd.grad(mean, trainer), torch.autograd.grad(exact, trainer))


def test_micro_batch_without_trained_tokens_has_a_gradient() -> None:
    logits, targets, mask = make_targets()
    for function in (from_recipe(DppoLoss()), from_recipe(IpoLoss()), cross_entropy):
        logits.grad = None
        evaluate(function, logits, targets, torch.zeros_like(mask)).loss.backward()
        assert logits.grad is not None and (logits.grad == 0).all()


def test_cross_entropy_matches_torch() -> None:
    logits, targets, mask = make_targets()
    ones = replace(targets, temperatures=torch.ones_like(targets.temperatures))
    expected = torch.nn.functional.cross_entropy(logits[mask], targets.labels[mask], reduction="sum")
    assert evaluate(cross_entropy, logits, ones, mask).loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_observed_tokens_add_only_weighted_cross_entropy() -> None:
    logits, targets, mask = make_targets()
    function = from_recipe(DppoLoss())
    observed = ~mask & (torch.arange(LENGTH) % 2 == 0)
    weights = torch.where(observed, 0.1 + targets.labels / 10, 0)
    both = replace(
        targets,
        echo_weights=weights,
        temperatures=torch.where(observed, 1.0, targets.temperatures),
    )
    sums = evaluate(function, logits, both, mask | observed)
    sums.loss.backward()
    actual, logits.grad = logits.grad, None
    alone = evaluate(function, logits, targets, mask)
    nll = -logits.double().log_softmax(-1).gather(-1, targets.labels.unsqueeze(-1))[..., 0]
    expected = (weights * nll)[observed].sum()
    (alone.loss + expected).backward()
    assert sums.metrics["echo_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums.loss.item() == pytest.approx(alone.loss.item() + expected.item(), rel=1e-5)
    assert actual is not None and logits.grad is not None
    torch.testing.assert_close(actual, logits.grad, atol=1e-5, rtol=1e-4)
    for name in alone.metrics.keys() - {"loss", "echo_loss"}:
        assert sums.metrics[name].item() == pytest.approx(alone.metrics[name].item(), rel=1e-5), name


def reinforce(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets, bonus: float) -> Sums:
    """A custom loss."""
    loss = -(targets.advantages * logprobs).sum()
    return Sums(loss, {"bonus": bonus * entropy.sum()})


def test_custom_loss_is_imported_by_path() -> None:
    logits, targets, mask = make_targets()
    config = CustomLoss(function=f"{__name__}:reinforce", kwargs={"bonus": 2.0})
    sums = evaluate(from_recipe(config), logits, targets, mask)
    scaled = logits.detach() / targets.temperatures.unsqueeze(-1)
    chosen = scaled.log_softmax(-1).gather(-1, targets.labels.unsqueeze(-1))[..., 0]
    expected = -(targets.advantages * chosen)[mask].sum().item()
    assert sums.loss.item() == sums.metrics["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert sums.metrics["bonus"].item() == pytest.approx(2 * sums.metrics["entropy"].item())
    assert sums.metrics["off_policy_kl"].item() > 0
    for missing in ("no_such_package.losses:f", f"{__name__}:no_such_function"):
        with pytest.raises(ValueError, match=f"{missing} cannot be imported"):
            from_recipe(CustomLoss(function=missing))


def test_example_loss_is_reinforce_with_capped_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = load_recipe(EXAMPLES / "own_loss.yaml").trainer.loss
    assert isinstance(config, CustomLoss) and config.kwargs == {"cap": 2.0}
    logits, targets, mask = make_targets()
    sums = evaluate(from_recipe(config), logits, targets, mask)
    sums.loss.backward()
    exact = logits.detach().double().requires_grad_()
    total, capped = torch.zeros((), dtype=torch.float64), 0
    for row, column in np.argwhere(mask.numpy()):
        scaled = exact[row, column] / targets.temperatures[row, column].double()
        log_p = scaled.log_softmax(-1)[targets.labels[row, column]]
        ratio = (log_p - targets.logprobs[row, column].double()).exp().item()
        capped += ratio > 2
        total = total - min(ratio, 2.0) * targets.advantages[row, column].double() * log_p
    total.backward()
    assert 0 < capped < mask.sum() and sums.metrics["capped_fraction"].item() == capped
    assert sums.loss.item() == pytest.approx(total.item(), rel=1e-5)
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-5, rtol=1e-4)
