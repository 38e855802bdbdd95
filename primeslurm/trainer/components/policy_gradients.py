"""Importance weights and trust regions of the policy gradient losses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from primeslurm.recipe.sections.losses import CispoLoss, DppoLoss, GrpoClipLoss, GspoLoss, IpoLoss
from primeslurm.trainer.components.documents import Documents

PolicyGradientLoss = DppoLoss | IpoLoss | GrpoClipLoss | GspoLoss | CispoLoss


@dataclass(frozen=True)
class Importance:
    """Importance weights of sampled tokens [trained tokens]."""

    weight: torch.Tensor
    """Weight of each token. Its gradient is weight * grad(log p), so times an advantage it is a policy gradient."""
    moved: torch.Tensor
    """The quantity that the trust region bounds, without gradient: p_trainer - p_engine, or a ratio."""
    capped: torch.Tensor | None = None
    """Whether `ratio_cap` limits the weight. None: the loss has no `ratio_cap`."""


def importance(
    config: PolicyGradientLoss, logprobs: torch.Tensor, engine: torch.Tensor, documents: Documents
) -> Importance:
    """Return the importance weights of a loss.

    The weight is the ratio r = p_trainer / p_engine of the token. `cispo` clips it. `gspo` uses the ratio of the whole
    sequence. Ratios above `ratio_cap` become a constant weight without gradient. `logprobs` (of the trainer, with
    gradient) and `engine` are [trained tokens].
    """
    difference = logprobs - engine
    fixed = difference.detach().exp()
    unit = (logprobs - logprobs.detach()).exp()
    if isinstance(config, CispoLoss):
        return Importance(fixed.clamp(config.min_ratio, config.max_ratio) * unit, fixed)
    cap = config.ratio_cap or math.inf
    if isinstance(config, GspoLoss):
        # GSPO-token, eq. 13 of arXiv 2507.18071: the sequence's ratio is a constant, so other ranks' tokens of the
        # sequence contribute a number and need no gradient.
        ratio = documents.mean(difference.detach()).exp()
        return Importance(ratio.clamp(max=cap) * unit, ratio, ratio > cap)
    moved = fixed if isinstance(config, GrpoClipLoss) else logprobs.detach().exp() - engine.exp()
    # Limit the exponent instead of the exponential: exp overflows above 88, and 0 * inf in its gradient is NaN even
    # where `surrogate` drops the token.
    return Importance(at_most(difference, math.log(cap)).exp(), moved, fixed > cap)


def at_most(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Limit values to `bound` but keep their gradient. Smaller values do not change by a bit."""
    return values - (values.detach() - bound).clamp(min=0)


def outside(
    config: PolicyGradientLoss, moved: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens left the trust region upwards, and which downwards (two bool tensors [trained tokens]).

    - `dppo` (arXiv 2602.04879), `grpo_clip` and `gspo`: tokens that the gradient would move further out.
    - `ipo` (prime-rl): also tokens that it would move back, because so large a difference is more likely an error.
    - `cispo`: tokens whose weight is clipped.
    """
    if isinstance(config, DppoLoss):
        return (advantages > 0) & (moved > config.mask_high), (advantages <= 0) & (moved < -config.mask_low)
    if isinstance(config, IpoLoss):
        return moved > config.threshold, moved < -config.threshold
    if isinstance(config, CispoLoss):
        return moved > config.max_ratio, moved < config.min_ratio
    too_high = (advantages > 0) & (moved > 1 + config.clip_high)
    if isinstance(config, GrpoClipLoss) and config.dual_clip is not None:
        too_high |= (advantages <= 0) & (moved > config.dual_clip)
    return too_high, (advantages <= 0) & (moved < 1 - config.clip_low)


def inside(config: PolicyGradientLoss, moved: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return which tokens keep their policy gradient [trained tokens]: those in the trust region; for `cispo` all."""
    if isinstance(config, CispoLoss):
        return torch.ones_like(moved, dtype=torch.bool)
    too_high, too_low = outside(config, moved, advantages)
    return ~(too_high | too_low)


def surrogate(
    config: PolicyGradientLoss, logprobs: torch.Tensor, weights: Importance, advantages: torch.Tensor
) -> torch.Tensor:
    """Return each token's term of the loss [trained tokens].

    Terms outside the trust region have no gradient. They are 0 for trust regions of probabilities, and the bound times
    the advantage for trust regions of ratios.
    """
    if isinstance(config, CispoLoss):
        return -advantages * weights.weight.detach() * logprobs
    keep = inside(config, weights.moved, advantages)
    if isinstance(config, DppoLoss | IpoLoss):
        return -advantages * weights.weight * keep
    bound = weights.moved.clamp(1 - config.clip_low, 1 + config.clip_high)
    if isinstance(config, GrpoClipLoss) and config.dual_clip is not None:
        bound = torch.where((advantages <= 0) & (weights.moved > config.dual_clip), config.dual_clip, bound)
    return -advantages * torch.where(keep, weights.weight, bound)
