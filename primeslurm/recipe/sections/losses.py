"""RL losses. For each token of a rollout, d is the trainer's log-probability minus the engine's.

Ratios compare the trainer with the engine that sampled the token, for any policy version. Each batch is trained once,
so a ratio to the trainer before the step would be 1 for every token and would correct nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import ImportPath, Json

Average = Literal["tokens", "rollouts", "seq_len"]


class PolicyGradient(Section):
    """Options of all importance-weighted policy gradients."""

    renamed = {"adv_tau": "advantage_coef"}

    advantage_coef: PositiveFloat = 1.0
    """Factor that multiplies every advantage."""
    average: Average = "tokens"
    """Average over a batch of N trained tokens from n rollouts. tokens: each token counts 1 / N (DAPO). rollouts:
    each rollout counts 1 / n, shared by its tokens (GRPO, GSPO). seq_len: each token counts 1 / (n * seq_len) (Dr.
    GRPO)."""
    kl_tau: float = 1e-3
    """Factor of d^2, the squared difference between the trainer's and the engine's log-probability, on every token. It
    keeps the trainer close to the policy that sampled."""
    ref_kl: PositiveFloat | None = None
    """Factor of an estimate of KL(policy || teacher), the KL penalty to a reference model. Needs a `teacher`. With u
    the teacher's log-probability minus the trainer's, clamped to [-15, 15], it adds `ref_kl * r * (exp(u) - 1 - u)`.
    Default: no KL penalty."""


class CappedPolicyGradient(PolicyGradient):
    """A policy gradient whose importance weight has an upper bound in addition to its trust region."""

    ratio_cap: float | None = Field(10.0, gt=1)
    """Largest importance weight (truncated importance sampling). A token (for `gspo`, a sequence) with a larger ratio
    is trained with this weight. null: no bound."""


class DppoLoss(CappedPolicyGradient):
    """Importance-weighted policy gradient that drops tokens whose probability has already moved too far.

    With d the trainer's log-probability minus the engine's, r = exp(d), dp = p_trainer - p_engine and A the advantage,
    the loss is `-advantage_coef * A * r * keep + kl_tau * d**2`. `keep` is false if A > 0 and dp > mask_high, or if
    A <= 0 and dp < -mask_low.
    """

    type: Literal["dppo"] = "dppo"
    mask_low: PositiveFloat = 0.2
    """Largest decrease of a token's probability before a token with a negative advantage is dropped."""
    mask_high: PositiveFloat = 0.2
    """Largest increase of a token's probability before a token with a positive advantage is dropped."""


class IpoLoss(CappedPolicyGradient):
    """The same as dppo, but a token is dropped in both directions and for any advantage.

    `keep` is false if abs(dp) > threshold.
    """

    type: Literal["ipo"] = "ipo"
    threshold: PositiveFloat = 0.1
    """Largest change of a token's probability before the token is dropped."""


class GrpoClipLoss(CappedPolicyGradient):
    """The clipped ratio of PPO and GRPO.

    With d the trainer's log-probability minus the engine's and r = exp(d), the loss is `-advantage_coef * min(r * A,
    clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_tau * d**2`. The default bounds are those of DAPO (clip-higher, arXiv
    2503.14476).
    """

    type: Literal["grpo_clip"] = "grpo_clip"
    kl_tau: NonNegativeFloat = 0.0
    """Factor of d^2 on every token, as for `dppo`. Default 0, as in the papers."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped to at least 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The ratio is clipped to at most 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the ratio for negative advantages (dual-clip PPO, arXiv 1912.09729); 3 is usual. Default: only
    `ratio_cap` applies."""


class GspoLoss(CappedPolicyGradient):
    """The clipped ratio of whole sequences: all tokens of a sequence are trained with one ratio, or none is.

    With d the trainer's log-probability minus the engine's and s = exp(mean of d over the trained tokens), the loss is
    `-advantage_coef * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A) + kl_tau * d**2` (arXiv 2507.18071). A
    rollout with a branched conversation counts as several sequences. The default bounds are those of the paper. They
    are narrow: widen them if `trainer/masked_fraction` is high.
    """

    type: Literal["gspo"] = "gspo"
    average: Average = "rollouts"
    """Average over the batch, as for `grpo_clip`. Default: rollouts, as in the paper."""
    kl_tau: NonNegativeFloat = 0.0
    """Factor of d^2 on every token, as for `dppo`. Default 0, as in the paper."""
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The sequence ratio is clipped to at least 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The sequence ratio is clipped to at most 1 + clip_high."""


class CispoLoss(PolicyGradient):
    """REINFORCE with a clipped importance weight: every token keeps its gradient.

    With d the trainer's log-probability minus the engine's, r = exp(d), and no gradient through the weight, the loss is
    `-advantage_coef * A * clip(r, min_ratio, max_ratio) * log p + kl_tau * d**2` (MiniMax-M1, arXiv 2506.13585).
    """

    type: Literal["cispo"] = "cispo"
    kl_tau: NonNegativeFloat = 0.0
    """Factor of d^2 on every token, as for `dppo`. Default 0, as in the paper."""
    min_ratio: float = Field(0.0, ge=0, lt=1)
    """Smallest importance weight (1 - epsilon_low in the paper)."""
    max_ratio: float = Field(5.0, gt=1)
    """Largest importance weight (1 + epsilon_high in the paper). Values from 4 to 8 behave alike (arXiv 2510.13786)."""


class CustomLoss(Section):
    """Your own loss function.

    It must be importable wherever the trainer runs. It is called with (logprobs, entropy, targets, **kwargs) as
    described in `primeslurm/trainer/components/loss.py`, and returns `Sums`.
    """

    type: Literal["custom"] = "custom"
    function: ImportPath
    """Import path of the function, for example `my_package.losses:clipped`."""
    kwargs: dict[str, Json] = {}
    """Additional keyword arguments of the function."""


Loss = DppoLoss | IpoLoss | GrpoClipLoss | GspoLoss | CispoLoss | CustomLoss
