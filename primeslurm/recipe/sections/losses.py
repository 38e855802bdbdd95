"""What the trainer minimises in RL. Per token of a rollout, d is the trainer's log-probability minus the engine's.

Ratios are those of the trainer to the engine that sampled, of whatever policy version it had: each batch is trained
once, so a ratio to the trainer before the step would be 1 for every token, and correct for nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import ImportPath, Json

Average = Literal["tokens", "rollouts", "seq_len"]


class PolicyGradient(Section):
    """What importance-weighted policy gradients have in common."""

    adv_tau: PositiveFloat = 1.0
    """Factor of the advantages."""
    average: Average = "tokens"
    """What advantages are averaged over, in a batch of N trained tokens of n rollouts. tokens: every trained token
    counts 1 / N (DAPO). rollouts: every rollout counts 1 / n, shared evenly by its own trained tokens (GRPO as first
    published, GSPO). seq_len: every trained token counts 1 / (n * seq_len), however long rollouts are (Dr. GRPO)."""
    kl_tau: float = 1e-3
    """Factor of d**2, which holds the trainer to the sampling policy on every token, masked or not."""
    ref_kl: PositiveFloat | None = None
    """Factor of an estimate of KL(trainer || teacher), which holds the trainer to a `teacher`. With u the teacher's
    log-probability minus the trainer's, at most 15 either way: `ref_kl * r * (exp(u) - 1 - u)`, masked as if u were
    the advantage."""


class CappedPolicyGradient(PolicyGradient):
    """A policy gradient whose importance weight has an upper bound beside its trust region."""

    ratio_cap: float | None = Field(10.0, gt=1)
    """Largest importance weight. A token (for `gspo`, a sequence) with a larger r is trained with this weight, without
    gradient through it (truncated importance sampling). It bounds the pull of tokens that the engine thought much less
    likely than the trainer does. null: unbounded, as in prime-rl."""


class DppoLoss(CappedPolicyGradient):
    """Importance-weighted policy gradient, masked where it would move a probability on that moved far already.

    With r = exp(d), dp = p_trainer - p_engine and A the advantage: `-adv_tau * A * r * keep + kl_tau * d**2`; keep is
    false if A > 0 and dp > mask_high, or A <= 0 and dp < -mask_low.
    """

    type: Literal["dppo"] = "dppo"
    mask_low: PositiveFloat = 0.2
    mask_high: PositiveFloat = 0.2


class IpoLoss(CappedPolicyGradient):
    """The same, masked on either side whatever the advantage: keep is false if abs(dp) > threshold."""

    type: Literal["ipo"] = "ipo"
    threshold: PositiveFloat = 0.1


class GrpoClipLoss(CappedPolicyGradient):
    """The clipped ratio of PPO and GRPO: a token whose ratio moved far already is pulled no further.

    With r = exp(d): `-adv_tau * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_tau * d**2`. A higher upper
    bound (clip-higher of DAPO, arXiv 2503.14476, whose numbers are the defaults) lets unlikely tokens grow.
    """

    type: Literal["grpo_clip"] = "grpo_clip"
    kl_tau: NonNegativeFloat = 0.0
    """As of `dppo`. Default: none, as in the papers."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: PositiveFloat = 0.28
    dual_clip: float | None = Field(None, gt=1)
    """A negative advantage is multiplied by no more than this (dual-clip PPO, arXiv 1912.09729; 3 is usual), which
    bounds the pull on tokens that grew much likelier. Default: only `ratio_cap` bounds it."""


class GspoLoss(CappedPolicyGradient):
    """The clipped ratio of whole sequences: all tokens of a sequence are trained with one ratio, or not at all.

    With s = exp(mean of d over the trained tokens of the sequence): `-adv_tau * min(s * A, clip(s, 1 - clip_low,
    1 + clip_high) * A) + kl_tau * d**2` (arXiv 2507.18071; as GSPO-token has it where advantages differ within a
    sequence). A rollout whose conversation branched is several sequences. The defaults are the paper's; they are
    narrow, and must be wider than what engine and trainer differ by in the mean of a sequence.
    """

    type: Literal["gspo"] = "gspo"
    average: Average = "rollouts"
    """As of `grpo_clip`. Default: the paper's."""
    kl_tau: NonNegativeFloat = 0.0
    """As of `dppo`. Default: none, as in the paper."""
    clip_low: float = Field(3e-4, gt=0, lt=1)
    clip_high: PositiveFloat = 4e-4


class CispoLoss(PolicyGradient):
    """REINFORCE with a clipped importance weight: no token loses its gradient, however far it moved.

    With r = exp(d), and no gradient through the weight: `-adv_tau * A * clip(r, min_ratio, max_ratio) * log p + kl_tau
    * d**2` (MiniMax-M1, arXiv 2506.13585, which bounds the weight from above alone).
    """

    type: Literal["cispo"] = "cispo"
    kl_tau: NonNegativeFloat = 0.0
    """As of `dppo`. Default: none, as in the paper."""
    min_ratio: float = Field(0.0, ge=0, lt=1)
    """1 - epsilon_low of the paper."""
    max_ratio: float = Field(5.0, gt=1)
    """1 + epsilon_high of the paper, which names no number; 4 to 8 are found to be alike in arXiv 2510.13786."""


class CustomLoss(Section):
    """A function of one's own, which must be importable wherever the trainer runs.

    It is called with (logprobs, entropy, targets, **kwargs) as described in `primeslurm/trainer/components/loss.py`,
    and returns `Sums`.
    """

    type: Literal["custom"] = "custom"
    function: ImportPath
    """For example my_package.losses:clipped."""
    kwargs: dict[str, Json] = {}
    """Named arguments besides."""


Loss = DppoLoss | IpoLoss | GrpoClipLoss | GspoLoss | CispoLoss | CustomLoss
