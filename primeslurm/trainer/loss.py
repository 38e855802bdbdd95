"""Losses over packed rows, summed over trained tokens; the caller divides by the batch's global token count.

A loss takes the policy's log-probability and entropy of each trained token, [trained tokens] as `logprobs.py` computes
them, and the targets of all positions: `targets.x[targets.mask]` is in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from primeslurm.recipe.training import Loss


@dataclass(frozen=True)
class Targets:
    """What each position is trained towards. All tensors are [rows, len]."""

    labels: torch.Tensor
    """The token that this position predicts."""
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


LossFunction = Callable[[torch.Tensor, torch.Tensor, Targets], Sums]


def dppo(config: Loss) -> LossFunction:
    """The policy-gradient loss described at `primeslurm.recipe.training.Loss`.

    Its metrics: off_policy_kl = r - d - 1, which estimates KL(sampling policy || trainer) and is never negative;
    mismatch_kl, the same over on-policy tokens alone, where only numerics differ; entropy; the
    fractions masked because a probability rose (high) or fell (low) too far; importance_ratio = r.
    """

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
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


def cross_entropy(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
    """Negative log-likelihood of the trained tokens."""
    return Sums(-logprobs.sum(), {"loss": -logprobs.detach().sum(), "entropy": entropy.sum()})
