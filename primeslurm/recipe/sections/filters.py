"""Which finished rollouts are not trained, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from primeslurm.recipe.fields.section import Section

RolloutAction = Literal["drop", "mask", "monitor"]
"""drop: the rollout leaves its group, whose mean is then that of the others. mask: it counts in its group's mean, but
none of its tokens is trained. monitor: it is counted, nothing else."""


class ZeroAdvantage(Section):
    """Groups in which no token has an advantage: all rewards are equal, so that they pull the policy nowhere."""

    type: Literal["zero_advantage"] = "zero_advantage"
    action: Literal["drop", "monitor"] = "drop"
    """drop: another group is sampled in its place."""


class Truncated(Section):
    """Rollouts whose last answer was cut off, by `max_tokens` or by the longest sequence that engines accept."""

    type: Literal["truncated"] = "truncated"
    action: RolloutAction = "mask"


class Length(Section):
    """Rollouts of which the policy sampled too few or too many tokens, over all turns."""

    type: Literal["length"] = "length"
    min_tokens: NonNegativeInt = 0
    max_tokens: PositiveInt | None = None
    action: RolloutAction = "drop"


class Repetition(Section):
    """Rollouts in which so many sampled tokens follow one another that the policy was all but sure of: it loops."""

    type: Literal["repetition"] = "repetition"
    run: PositiveInt = 3000
    """Sampled tokens in a row, over turns."""
    probability: float = Field(0.99, gt=0, lt=1)
    """Each was sampled with more than this."""
    action: RolloutAction = "mask"


class Gibberish(Section):
    """Rollouts with a rare token that came out of nowhere.

    Rare is a token id above `token_id`, as tokenizers add the most frequent first. It came out of nowhere if its
    log-probability is below -log(vocabulary) - `offset`, far less than that of a blind guess.
    """

    type: Literal["gibberish"] = "gibberish"
    token_id: NonNegativeInt = 100_000
    offset: NonNegativeFloat = 2.0
    vocabulary: PositiveInt | None = None
    """Number of token ids. Default: what the model's config.json says."""
    action: RolloutAction = "mask"


Filter = Annotated[ZeroAdvantage | Truncated | Length | Repetition | Gibberish, Field(discriminator="type")]
Filters = tuple[Filter, ...]
