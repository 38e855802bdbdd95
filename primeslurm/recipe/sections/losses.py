"""What the trainer minimises in RL. Per token of a rollout, d is the trainer's log-probability minus the engine's."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import ImportPath, Json


class PolicyGradient(Section):
    """What importance-weighted policy gradients have in common."""

    adv_tau: PositiveFloat = 1.0
    """Factor of the advantages."""
    kl_tau: float = 1e-3
    """Factor of d**2, which holds the trainer to the sampling policy on every token, masked or not."""
    ref_kl: PositiveFloat | None = None
    """Factor of an estimate of KL(trainer || teacher), which holds the trainer to a `teacher`. With u the teacher's
    log-probability minus the trainer's: `ref_kl * r * (exp(u) - 1 - u)`, masked as if u were the advantage."""


class DppoLoss(PolicyGradient):
    """Importance-weighted policy gradient, masked where it would move a probability on that moved far already.

    With r = exp(d), dp = p_trainer - p_engine and A the advantage: `-adv_tau * A * r * keep + kl_tau * d**2`; keep is
    false if A > 0 and dp > mask_high, or A <= 0 and dp < -mask_low.
    """

    type: Literal["dppo"] = "dppo"
    mask_low: PositiveFloat = 0.2
    mask_high: PositiveFloat = 0.2


class IpoLoss(PolicyGradient):
    """The same, masked on either side whatever the advantage: keep is false if abs(dp) > threshold."""

    type: Literal["ipo"] = "ipo"
    threshold: PositiveFloat = 0.1


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


Loss = DppoLoss | IpoLoss | CustomLoss
