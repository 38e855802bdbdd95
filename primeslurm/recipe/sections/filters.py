"""Filters: which finished rollouts and groups are not trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from primeslurm.recipe.fields.section import Section

RolloutAction = Literal["drop", "mask", "monitor"]


class ZeroAdvantage(Section):
    """Groups in which no token has an advantage, because all rewards are equal. They would not change the policy."""

    type: Literal["zero_advantage"] = "zero_advantage"
    action: Literal["drop", "monitor"] = "drop"
    """drop: sample another prompt instead. monitor: only count such groups."""


class Truncated(Section):
    """Rollouts whose last answer was cut off by `max_tokens` or by the longest sequence of the engines."""

    type: Literal["truncated"] = "truncated"
    action: RolloutAction = "mask"
    """drop: remove the rollout from its group. mask: use its reward for the group's mean, but train none of its tokens.
    monitor: only count it."""


class Length(Section):
    """Rollouts with too few or too many sampled tokens over all turns."""

    type: Literal["length"] = "length"
    min_tokens: NonNegativeInt = 0
    """Filter rollouts with fewer sampled tokens than this."""
    max_tokens: PositiveInt | None = None
    """Filter rollouts with more sampled tokens than this. Default: no upper bound."""
    action: RolloutAction = "drop"
    """drop: remove the rollout from its group. mask: use its reward for the group's mean, but train none of its tokens.
    monitor: only count it."""


class Repetition(Section):
    """Rollouts with a long run of sampled tokens that the policy was almost certain of, which is a sign of a loop."""

    type: Literal["repetition"] = "repetition"
    run: PositiveInt = 3000
    """Length of the run in sampled tokens, over all turns."""
    probability: float = Field(0.99, gt=0, lt=1)
    """Each token of the run was sampled with a probability above this."""
    action: RolloutAction = "mask"
    """drop: remove the rollout from its group. mask: use its reward for the group's mean, but train none of its tokens.
    monitor: only count it."""


class Gibberish(Section):
    """Rollouts with a rare token that the model found very unlikely.

    A token is rare if its id is above `token_id`, because tokenizers add frequent tokens first. It is very unlikely if
    its log-probability is below -log(vocabulary) - `offset`.
    """

    type: Literal["gibberish"] = "gibberish"
    token_id: NonNegativeInt = 100_000
    """Token ids above this count as rare."""
    offset: NonNegativeFloat = 2.0
    """Distance of the log-probability below that of a uniform guess, in nats."""
    vocabulary: PositiveInt | None = None
    """Number of token ids of the model. Default: the number in the model's config.json."""
    action: RolloutAction = "mask"
    """drop: remove the rollout from its group. mask: use its reward for the group's mean, but train none of its tokens.
    monitor: only count it."""


Filter = Annotated[ZeroAdvantage | Truncated | Length | Repetition | Gibberish, Field(discriminator="type")]
Filters = tuple[Filter, ...]
