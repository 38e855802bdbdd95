"""Losses over packed rows, summed over trained tokens; the caller divides by the batch's global token count.

A loss takes the policy's log-probability and entropy of each trained token, [trained tokens] as `logprobs.py` computes
them, and the targets of the same tokens. A micro batch may have no trained token at all: sums of nothing are 0, and
still reach every parameter in the backward pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from primeslurm.recipe.sections.losses import CustomLoss, Loss
from primeslurm.trainer.components.documents import Documents
from primeslurm.trainer.components.policy_gradients import (
    Importance,
    PolicyGradientLoss,
    at_most,
    importance,
    kept,
    outside,
    surrogate,
)
from primeslurm.wire.batches.rollout import MAX_LOGPROB, MIN_LOGPROB

MOST_TOWARDS = 15.0
"""Bound of the teacher's log-probability minus the trainer's, either way. Above about 16, float32 has no digit left of
exp(u) - 1 - u for its gradient."""


@dataclass(frozen=True)
class Targets:
    """What is trained towards: tensors [rows, len] of all positions, or [trained tokens], as losses get them."""

    labels: torch.Tensor
    """The token that a position predicts."""
    logprobs: torch.Tensor
    """The engine's log-probability of it."""
    advantages: torch.Tensor
    temperatures: torch.Tensor
    """The temperature it was sampled at."""
    on_policy: torch.Tensor
    """Whether the policy being trained sampled its whole rollout."""
    ref_logprobs: torch.Tensor
    """The teacher's log-probability of the token, where it was sampled; 0 without a teacher."""
    documents: Documents
    """Which of the tokens are of the same sequence."""
    echo_weights: torch.Tensor | None = None
    """Above 0: the token was not sampled, and is trained by cross-entropy times this. None: all were sampled."""

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Targets:
        """The same with every tensor changed."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "documents"}
        changed = {name: change(value) for name, value in values.items() if value is not None}
        return replace(self, documents=replace(self.documents, index=change(self.documents.index)), **changed)


@dataclass(frozen=True)
class Sums:
    """A loss to differentiate, and metrics, each summed over this micro batch's trained tokens."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


LossFunction = Callable[[torch.Tensor, torch.Tensor, Targets], Sums]


def from_recipe(config: Loss) -> LossFunction:
    """The loss that a recipe asks for, on sampled tokens, and cross-entropy on those that were only observed.

    Both add up, each over its own tokens. Metrics that every loss of sampled tokens has are added; echo_loss is the
    part of the cross-entropy.

    A token whose log-probability by the engine is impossible (NaN, infinite, below MIN_LOGPROB or above MAX_LOGPROB)
    is not trained: the function gets the trainer's own log-probability in its place, an advantage of 0, and no
    gradient flows back. impossible_fraction counts these tokens.

    Raises:
        ValueError: there is no such custom function.
    """
    function = _function(config)

    def sampled_loss(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
        possible = (targets.logprobs >= MIN_LOGPROB) & (targets.logprobs <= MAX_LOGPROB)  # false for NaN
        own = logprobs.detach()
        logprobs = torch.where(possible, logprobs, own)
        targets = replace(
            targets,
            logprobs=torch.where(possible, targets.logprobs, own),
            ref_logprobs=torch.where(possible, targets.ref_logprobs, own),
            advantages=torch.where(possible, targets.advantages, 0.0),
        )
        sums = function(logprobs, entropy, targets)
        metrics = {"entropy": entropy.sum(), "impossible_fraction": (~possible).float().sum()}
        return Sums(sums.loss, metrics | _mismatch(own, targets) | sums.metrics)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
        weights = targets.echo_weights
        if weights is None:
            sums, echo = sampled_loss(logprobs, entropy, targets), logprobs.new_zeros(())
        else:
            own = weights == 0
            sums = sampled_loss(logprobs[own], entropy[own], targets.apply(lambda tensor: tensor[own]))
            echo = -(weights * logprobs).sum()
        total = sums.loss + echo
        return Sums(total, {"loss": total.detach(), "echo_loss": echo.detach()} | sums.metrics)

    return loss


def cross_entropy(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
    """Negative log-likelihood of the trained tokens; `logprobs` and `entropy` are [trained tokens]."""
    return Sums(-logprobs.sum(), {"loss": -logprobs.detach().sum(), "entropy": entropy.sum()})


def _function(config: Loss) -> LossFunction:
    if isinstance(config, CustomLoss):
        return _custom(config)
    return partial(_policy_gradient, config)


def _mismatch(logprobs: torch.Tensor, targets: Targets) -> dict[str, torch.Tensor]:
    """How far the trainer is from the policy that sampled.

    off_policy_kl = r - d - 1, whose expectation over sampled tokens is KL(sampling policy || trainer), and which is
    never negative (k3 of Schulman, Approximating KL Divergence, 2020); mismatch_kl, the same over on-policy tokens
    alone, where only numerics differ; importance_ratio = r.
    """
    difference = logprobs - targets.logprobs
    on_policy = targets.on_policy.float()
    kl = torch.expm1(difference) - difference
    return {
        "off_policy_kl": kl.sum(),
        "mismatch_kl": (kl * on_policy).sum(),
        "on_policy_fraction": on_policy.sum(),
        "importance_ratio": difference.exp().sum(),
    }


def _policy_gradient(
    config: PolicyGradientLoss, logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets
) -> Sums:
    """The policy gradients of `primeslurm.recipe.sections.losses`.

    The ratio r is not detached: A * r is the importance-sampling estimate of the advantage under the trainer, so its
    gradient A * r * grad(log p) is unbiased although older policies sampled. Trust regions only drop terms: a token
    outside keeps the gradient of kl_tau * d**2 alone. Those of probabilities (dp bounds the total variation) judge
    likely and unlikely tokens alike; a ratio lets likely tokens move far and stops unlikely ones at once.
    Metrics: the fractions outside, in all (masked), because the probability rose (high), and because it fell (low); for
    `cispo`, which drops none, those whose weight is clipped. capped_fraction, not for `cispo`: those whose weight
    `ratio_cap` bounds. And those of `_reference_kl`, with ref_kl.
    """
    difference = logprobs - targets.logprobs
    weights = importance(config, logprobs, targets.logprobs, targets.documents)
    terms = surrogate(config, logprobs, weights, targets.advantages)
    loss = (config.kl_tau * difference**2 + config.adv_tau * terms).sum()
    too_high, too_low = outside(config, weights.moved, targets.advantages)
    metrics = {
        "masked_fraction": (too_high | too_low).float().sum(),
        "masked_high_fraction": too_high.float().sum(),
        "masked_low_fraction": too_low.float().sum(),
    }
    if weights.capped is not None:
        metrics["capped_fraction"] = weights.capped.float().sum()
    if config.ref_kl is None:
        return Sums(loss, metrics)
    reference = _reference_kl(config, logprobs, weights, targets)
    return Sums(loss + config.ref_kl * reference.loss, metrics | reference.metrics)


def _reference_kl(config: PolicyGradientLoss, logprobs: torch.Tensor, weights: Importance, targets: Targets) -> Sums:
    """KL(trainer || teacher), from tokens that an older policy sampled: r * (exp(u) - 1 - u).

    u is the teacher's log-probability minus the trainer's. exp(u) - 1 - u is never negative, and its mean over the
    trainer's own samples is the KL (k3 of Schulman, Approximating KL Divergence, 2020). Its gradient alone would be
    that of KL(teacher || trainer); weighted by r, which is not detached, value and gradient are unbiased for samples of
    the engine (DeepSeek-V3.2, arXiv 2512.02556). The gradient is -r * u * grad(log p): a policy gradient with the
    advantage u (as the ref_kl loss of prime-rl has it), so the trust region drops the same terms as for one, and a loss
    with another weight than r weighs the KL by it, too. u is bounded by MOST_TOWARDS either way.
    Metric: ref_kl, the estimate with all terms.
    """
    towards = -at_most(-at_most(targets.ref_logprobs - logprobs, MOST_TOWARDS), MOST_TOWARDS)
    kl = weights.weight * (torch.expm1(towards) - towards)
    keep = kept(config, weights.moved, towards.detach())
    return Sums((kl * keep).sum(), {"ref_kl": kl.detach().sum()})


def _custom(config: CustomLoss) -> LossFunction:
    module, _, name = config.function.partition(":")
    try:
        function: LossFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"trainer.loss.function: {config.function} cannot be imported: {error}") from error
    return partial(function, **config.kwargs)
