"""Losses over packed rows, summed over trained tokens; the caller divides by the batch's global token count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from primeslurm.recipe.training import Loss


@dataclass(frozen=True)
class Targets:
    """What the logits of each position are trained towards. All tensors are [rows, len]."""

    labels: torch.Tensor
    """The token that the logits at this position predict."""
    mask: torch.Tensor
    """Whether that token is trained."""
    logprobs: torch.Tensor
    """The engine's log-probability of it."""
    advantages: torch.Tensor
    temperatures: torch.Tensor
    """The temperature it was sampled at."""
    on_policy: torch.Tensor
    """Whether the policy being trained sampled its whole rollout."""


@dataclass(frozen=True)
class Sums:
    """A loss to differentiate, and metrics, each summed over this micro batch's trained tokens."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


LossFunction = Callable[[torch.Tensor, Targets], Sums]


def token_logprobs(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each trained token at its sampling temperature, and the entropy it was drawn at.

    Args:
        logits: [rows, len, vocab], any float dtype.

    Returns:
        Two float32 tensors [trained tokens]; the entropy carries no gradient.
    """
    chosen = targets.mask
    scaled = logits[chosen].float() / targets.temperatures[chosen].unsqueeze(-1)
    log_z = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets.labels[chosen].unsqueeze(-1)).squeeze(-1) - log_z
    with torch.no_grad():
        entropy = log_z - (scaled.softmax(-1) * scaled).sum(-1)
    return logprobs, entropy


def dppo(config: Loss) -> LossFunction:
    """The policy-gradient loss described at `primeslurm.recipe.training.Loss`.

    Its metrics: off_policy_kl = r - d - 1, which estimates KL(sampling policy || trainer) and is never negative;
    mismatch_kl, the same over on-policy tokens alone, where only numerics differ; entropy; the
    fractions masked because a probability rose (high) or fell (low) too far; importance_ratio = r.
    """

    def loss(logits: torch.Tensor, targets: Targets) -> Sums:
        logprobs, entropy = token_logprobs(logits, targets)
        engine = targets.logprobs[targets.mask]
        on_policy = targets.on_policy[targets.mask].float()
        advantages = targets.advantages[targets.mask]
        difference = logprobs - engine
        ratio = difference.exp()
        with torch.no_grad():
            moved = logprobs.exp() - engine.exp()
            too_high = (advantages > 0) & (moved > config.mask_high)
            too_low = (advantages <= 0) & (moved < -config.mask_low)
            keep = ~(too_high | too_low)
            kl = torch.expm1(difference) - difference
        per_token = -config.adv_tau * advantages * ratio * keep + config.kl_tau * difference**2
        return Sums(
            per_token.sum(),
            {
                "loss": per_token.detach().sum(),
                "off_policy_kl": kl.sum(),
                "mismatch_kl": (kl * on_policy).sum(),
                "on_policy_fraction": on_policy.sum(),
                "entropy": entropy.sum(),
                "masked_fraction": (~keep).float().sum(),
                "masked_high_fraction": too_high.float().sum(),
                "masked_low_fraction": too_low.float().sum(),
                "importance_ratio": ratio.detach().sum(),
            },
        )

    return loss


def cross_entropy(logits: torch.Tensor, targets: Targets) -> Sums:
    """Negative log-likelihood of the trained tokens."""
    logprobs, entropy = token_logprobs(logits, targets)
    return Sums(-logprobs.sum(), {"loss": -logprobs.detach().sum(), "entropy": entropy.sum()})
