"""Losses over packed rows, summed over trained tokens. The caller divides by the global token count of the batch.

A loss takes the log-probabilities and entropies [trained tokens] from `logprobs.py`, and the targets of the same
tokens. A micro batch may have no trained tokens. Its sums are 0, but still reach every parameter in the backward pass,
which FSDP needs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from primeslurm.nn.layers.prefix_tree import starts
from primeslurm.recipe.sections.losses import CispoLoss, CustomLoss, DppoLoss, GrpoClipLoss, GspoLoss, IpoLoss, Loss
from primeslurm.wire.batches.rollout import MAX_LOGPROB, MIN_LOGPROB


@dataclass(frozen=True)
class Documents:
    """The documents of a micro batch: the packed sequences, and the padding of each row. A branch is a document."""

    index: torch.Tensor  # document number of each token (int64, in the shape of the targets)
    count: int  # number of documents, the same on all ranks that share the rows
    group: Any = None  # Process group of the ranks that share the rows. None: this rank has whole rows.

    @classmethod
    def of(cls, positions: torch.Tensor, branches: torch.Tensor | None = None) -> Documents:
        """Number the documents of packed rows. Both tensors [rows, seq_len] are those of `nn.layers.prefix_tree`."""
        index = starts(positions, branches).flatten().cumsum(0) - 1
        return cls(index.view(positions.shape), int(index[-1]) + 1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average values [trained tokens] over each token's document, without gradient. Returns [trained tokens].

        A collective of the ranks that share the rows, including those without trained tokens.
        """
        with torch.no_grad():
            both = torch.stack([values, torch.ones_like(values)])
            sums = both.new_zeros(2, self.count).index_add_(1, self.index, both)
            if self.group is not None:
                dist.all_reduce(sums, group=self.group)
            total, tokens = sums[:, self.index]
            return total / tokens


# Limit of the absolute difference between teacher and trainer log-probabilities. Above about 16, exp(u) - 1 - u has no
# precise float32 gradient.
MAX_TEACHER_DIFFERENCE = 15.0


@dataclass(frozen=True)
class Targets:
    """Inputs of the loss for a micro batch: tensors [rows, len] of all positions, or [trained tokens] once selected."""

    labels: torch.Tensor  # token that the position predicts
    logprobs: torch.Tensor  # the engine's log-probability of the token
    advantages: torch.Tensor
    temperatures: torch.Tensor  # sampling temperature of the token
    on_policy: torch.Tensor  # whether the current policy sampled the whole rollout
    ref_logprobs: torch.Tensor  # The teacher's log-probability of a sampled token. 0 without a teacher.
    documents: Documents  # the packed sequence of each token
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


PolicyGradientLoss = DppoLoss | IpoLoss | GrpoClipLoss | GspoLoss | CispoLoss


@dataclass(frozen=True)
class Importance:
    """Importance weights of sampled tokens [trained tokens]."""

    weight: torch.Tensor
    """Weight of each token. Its gradient is weight * grad(log p), so times an advantage it is a policy gradient."""
    moved: torch.Tensor  # the quantity that the trust region bounds, without gradient: p_trainer - p_engine, or a ratio
    capped: torch.Tensor | None = None  # Whether `ratio_cap` limits the weight. None: the loss has no `ratio_cap`.


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
    """Limit values to `bound` but pass gradients through. Values below `bound` stay bit-identical."""
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
