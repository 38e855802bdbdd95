"""Penalties for long rollouts, subtracted from the reward before advantages are computed.

n is the number of tokens that the policy sampled in a rollout, over all turns, trained or not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section


class Overlong(Section):
    """Soft overlong punishment of DAPO.

    It subtracts `factor * clip((n - (max_tokens - buffer)) / buffer, 0, 1)`, with n the number of sampled tokens (arXiv
    2503.14476, equation 13).
    """

    type: Literal["overlong"] = "overlong"
    max_tokens: PositiveInt
    """From this many sampled tokens on, the whole penalty is subtracted."""
    buffer: PositiveInt
    """Number of tokens before `max_tokens` over which the penalty grows from 0."""
    factor: PositiveFloat = 1.0
    """Largest penalty, in units of reward."""


class Relative(Section):
    """Length reward of Kimi k1.5: compares a rollout with the shortest and the longest of its group.

    With l = 0.5 - (n - min n) / (max n - min n), it adds `factor * l` to the reward of a solved rollout and `factor *
    min(0, l)` to the reward of any other (arXiv 2501.12599, 2.3.3), with n the number of sampled tokens.
    """

    type: Literal["relative"] = "relative"
    factor: PositiveFloat = 0.1
    """Scale of the length reward, in units of reward."""


class Cost(Section):
    """Penalty for tokens and turns that grows with the group's success.

    It subtracts `p * (tokens * n / max n + turns * t / max t)`, with n sampled tokens, t turns, and p the group's mean
    reward cut to [0, 1].
    """

    type: Literal["cost"] = "cost"
    tokens: float = Field(0.25, ge=0)
    """Largest penalty for sampled tokens, in units of reward."""
    turns: float = Field(0.1, ge=0)
    """Largest penalty for turns, in units of reward."""


LengthPenalty = Annotated[Overlong | Relative | Cost, Field(discriminator="type")]
