"""What importance-weighted policy gradients differ in: the weight of a token, and where its gradient ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from primeslurm.recipe.sections.losses import CispoLoss, DppoLoss, GrpoClipLoss, GspoLoss, IpoLoss
from primeslurm.trainer.components.documents import Documents

PolicyGradientLoss = DppoLoss | IpoLoss | GrpoClipLoss | GspoLoss | CispoLoss


@dataclass(frozen=True)
class Importance:
    """Importance weights of sampled tokens. Tensors [trained tokens]."""

    weight: torch.Tensor
    """Its gradient is itself times that of the log-probability: times an advantage, it is a policy gradient."""
    moved: torch.Tensor
    """What a trust region bounds: p_trainer - p_engine for those of probabilities, else a ratio. No gradient."""
    capped: torch.Tensor | None = None
    """Whether `ratio_cap` bounds the token's weight. None: the loss has no `ratio_cap`."""


def importance(
    config: PolicyGradientLoss, logprobs: torch.Tensor, engine: torch.Tensor, documents: Documents
) -> Importance:
    """Importance weights as a loss has them.

    The ratio r; for `gspo` that of the token's sequence, s (the gradient of a mean over a sequence's tokens of s *
    A is that of s's own definition, so nothing but a number has to be known of other ranks' tokens: GSPO-token, eq. 13
    of arXiv 2507.18071); for `cispo` r clipped. A larger ratio than `ratio_cap` becomes that weight, without gradient
    through it.

    Args:
        config: the loss.
        logprobs: of the trainer, with gradient, [trained tokens].
        engine: log-probabilities of the same tokens by the engine, [trained tokens].
        documents: that they are in.
    """
    difference = logprobs - engine
    fixed = difference.detach().exp()
    unit = (logprobs - logprobs.detach()).exp()
    if isinstance(config, CispoLoss):
        return Importance(fixed.clamp(config.min_ratio, config.max_ratio) * unit, fixed)
    cap = config.ratio_cap or math.inf
    if isinstance(config, GspoLoss):
        of_sequence = documents.mean(difference.detach()).exp()
        return Importance(of_sequence.clamp(max=cap) * unit, of_sequence, of_sequence > cap)
    moved = fixed if isinstance(config, GrpoClipLoss) else logprobs.detach().exp() - engine.exp()
    # Bound the exponent, not the exponential: exp overflows above 88, and 0 * inf in its gradient is NaN even where
    # `surrogate` drops the token.
    return Importance(at_most(difference, math.log(cap)).exp(), moved, fixed > cap)


def at_most(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Replace values above `bound` by it and keep their gradient. Others stay the same, bit for bit."""
    return values - (values.detach() - bound).clamp(min=0)


def outside(
    config: PolicyGradientLoss, moved: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token's probability (or its sequence's) rose, or fell, out of the trust region.

    `dppo` (Divergence PPO, arXiv 2602.04879), `grpo_clip` and `gspo` have those outside that would be led further out;
    `ipo` (INTELLECT Policy Optimization, docs of prime-rl) also those that would be led back, because a probability
    that differs so much is more likely a fault than a step of learning; `cispo` those whose weight it clips.

    Args:
        config: the loss.
        moved: as `Importance.moved`, [trained tokens].
        advantages: [trained tokens].

    Returns:
        Two of bool [trained tokens].
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


def kept(config: PolicyGradientLoss, moved: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Whether each token's policy gradient is kept, [trained tokens]; `cispo` keeps all of them. As `outside`."""
    if isinstance(config, CispoLoss):
        return torch.ones_like(moved, dtype=torch.bool)
    too_high, too_low = outside(config, moved, advantages)
    return ~(too_high | too_low)


def surrogate(
    config: PolicyGradientLoss, logprobs: torch.Tensor, weights: Importance, advantages: torch.Tensor
) -> torch.Tensor:
    """What each token adds to the loss, [trained tokens].

    Terms that are not kept have no gradient: 0 where the trust region is one of probabilities, the bound times the
    advantage where it is one of ratios.
    """
    if isinstance(config, CispoLoss):
        return -advantages * weights.weight.detach() * logprobs
    keep = kept(config, weights.moved, advantages)
    if isinstance(config, DppoLoss | IpoLoss):
        return -advantages * weights.weight * keep
    bound = weights.moved.clamp(1 - config.clip_low, 1 + config.clip_high)
    if isinstance(config, GrpoClipLoss) and config.dual_clip is not None:
        bound = torch.where((advantages <= 0) & (weights.moved > config.dual_clip), config.dual_clip, bound)
    return -advantages * torch.where(keep, weights.weight, bound)
