"""Losses over packed rows, summed over trained tokens. The caller divides by the global token count of the batch.

A loss takes the log-probabilities and entropies [trained tokens] from `logprobs.py`, and the targets of the same
tokens. A micro batch may have no trained tokens. Its sums are 0, but still reach every parameter in the backward pass,
which FSDP needs.
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
    inside,
    outside,
    surrogate,
)
from primeslurm.wire.batches.rollout import MAX_LOGPROB, MIN_LOGPROB

# Limit of the absolute difference between teacher and trainer log-probabilities. Above about 16, exp(u) - 1 - u has no
# precise float32 gradient.
MAX_TEACHER_DIFFERENCE = 15.0


@dataclass(frozen=True)
class Targets:
    """Targets of a micro batch: tensors [rows, len] of all positions, or [trained tokens] for losses."""

    labels: torch.Tensor
    """Token that the position predicts."""
    logprobs: torch.Tensor
    """The engine's log-probability of the token."""
    advantages: torch.Tensor
    temperatures: torch.Tensor
    """Sampling temperature of the token."""
    on_policy: torch.Tensor
    """Whether the current policy sampled the whole rollout."""
    ref_logprobs: torch.Tensor
    """The teacher's log-probability of a sampled token. 0 without a teacher."""
    documents: Documents
    """Assignment of tokens to sequences."""
    echo_weights: torch.Tensor | None = None
    """Cross-entropy weight of observed tokens; 0 for sampled tokens. None: all tokens were sampled."""

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Targets:
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "documents"}
        changed = {name: change(value) for name, value in values.items() if value is not None}
        return replace(self, documents=replace(self.documents, index=change(self.documents.index)), **changed)


@dataclass(frozen=True)
class Sums:
    """A differentiable loss and metrics, each summed over the trained tokens of a micro batch."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


LossFunction = Callable[[torch.Tensor, torch.Tensor, Targets], Sums]


def from_recipe(config: Loss) -> LossFunction:
    """Return the recipe's loss: its policy gradient on sampled tokens, plus cross-entropy on observed tokens.

    Metric `echo_loss` is the cross-entropy term. `impossible_fraction` counts sampled tokens with an impossible engine
    log-probability (NaN, infinite or out of range), which are not trained. Raises ValueError if a custom loss cannot be
    imported.
    """
    function = _function(config)

    def sampled_loss(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
        possible = (targets.logprobs >= MIN_LOGPROB) & (targets.logprobs <= MAX_LOGPROB)  # False for NaN
        # Impossible tokens get the trainer's own log-probability, so that no NaN reaches a gradient, and advantage 0.
        detached = logprobs.detach()
        logprobs = torch.where(possible, logprobs, detached)
        targets = replace(
            targets,
            logprobs=torch.where(possible, targets.logprobs, detached),
            ref_logprobs=torch.where(possible, targets.ref_logprobs, detached),
            advantages=torch.where(possible, targets.advantages, 0.0),
        )
        sums = function(logprobs, entropy, targets)
        metrics = {"entropy": entropy.sum(), "impossible_fraction": (~possible).float().sum()}
        return Sums(sums.loss, metrics | _mismatch(detached, targets) | sums.metrics)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
        weights = targets.echo_weights
        if weights is None:
            sums, echo = sampled_loss(logprobs, entropy, targets), logprobs.new_zeros(())
        else:
            sampled = weights == 0
            sums = sampled_loss(logprobs[sampled], entropy[sampled], targets.apply(lambda tensor: tensor[sampled]))
            echo = -(weights * logprobs).sum()
        total = sums.loss + echo
        return Sums(total, {"loss": total.detach(), "echo_loss": echo.detach()} | sums.metrics)

    return loss


def cross_entropy(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
    return Sums(-logprobs.sum(), {"loss": -logprobs.detach().sum(), "entropy": entropy.sum()})


def _function(config: Loss) -> LossFunction:
    if isinstance(config, CustomLoss):
        return _custom(config)
    return partial(_policy_gradient, config)


def _mismatch(logprobs: torch.Tensor, targets: Targets) -> dict[str, torch.Tensor]:
    # With d = log p_trainer - log p_engine and r = exp(d):
    #
    # - off_policy_kl = r - d - 1, an estimate of KL(sampling policy || trainer) that is never negative (k3 of Schulman,
    #   Approximating KL Divergence, 2020).
    # - mismatch_kl: the same over on-policy tokens only, where only numerics differ.
    # - importance_ratio = r.
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
    # The ratio r is not detached. A * r is the importance-sampling estimate of the advantage under the trainer, so its
    # gradient A * r * grad(log p) is unbiased although older policies sampled. A token outside the trust region keeps
    # only the gradient of kl_tau * d**2. Trust regions of probabilities (which bound the total variation) treat likely
    # and unlikely tokens alike, whereas ratios let likely tokens move far and stop unlikely ones at once.
    #
    # Metrics: masked_fraction, masked_high_fraction and masked_low_fraction are the tokens outside the trust region in
    # total, above and below it (for `cispo`, tokens with a clipped weight). capped_fraction is those that `ratio_cap`
    # limits. ref_kl is that of `_reference_kl`.
    difference = logprobs - targets.logprobs
    weights = importance(config, logprobs, targets.logprobs, targets.documents)
    terms = surrogate(config, logprobs, weights, targets.advantages)
    loss = (config.kl_tau * difference**2 + config.advantage_coef * terms).sum()
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
    """Estimate KL(trainer || teacher) from tokens of an older policy: r * (exp(u) - 1 - u)."""
    # u is the teacher's log-probability minus the trainer's. exp(u) - 1 - u is never negative, and its mean over
    # samples of the trainer is the KL (k3 of Schulman, Approximating KL Divergence, 2020). Its gradient alone would be
    # that of KL(teacher || trainer). Weighted by r, which is not detached, value and gradient are unbiased for samples
    # of the engine (DeepSeek-V3.2, arXiv 2512.02556).
    #
    # The gradient is -r * u * grad(log p), a policy gradient with advantage u (as in prime-rl's ref_kl loss). So the
    # trust region drops the same terms, and a loss with another weight than r uses that weight here, too. The metric
    # ref_kl includes all terms.
    towards = -at_most(-at_most(targets.ref_logprobs - logprobs, MAX_TEACHER_DIFFERENCE), MAX_TEACHER_DIFFERENCE)
    kl = weights.weight * (torch.expm1(towards) - towards)
    keep = inside(config, weights.moved, towards.detach())
    return Sums((kl * keep).sum(), {"ref_kl": kl.detach().sum()})


def _custom(config: CustomLoss) -> LossFunction:
    module, _, name = config.function.partition(":")
    try:
        function: LossFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"trainer.loss.function: {config.function} cannot be imported: {error}") from error
    return partial(function, **config.kwargs)
