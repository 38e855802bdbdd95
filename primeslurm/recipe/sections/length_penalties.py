"""What long rollouts lose of their reward, before advantages are made of it.

n is the number of tokens that the policy sampled in a trace: over all its turns, what will be trained of it or not.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section


class Overlong(Section):
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): nothing up to a length, then more and more.

    Takes `factor * clip((n - (max_tokens - buffer)) / buffer, 0, 1)`.
    """

    type: Literal["overlong"] = "overlong"
    max_tokens: PositiveInt
    """From here on all of `factor` is taken."""
    buffer: PositiveInt
    """Tokens before `max_tokens` over which the penalty grows."""
    factor: PositiveFloat = 1.0


class Relative(Section):
    """Length reward of Kimi k1.5 (arXiv 2501.12599, 2.3.3): traces of a group against the shortest and the longest.

    With l = 0.5 - (n - min n) / (max n - min n), over the traces of the same agent: adds `factor * l` to a reward of at
    least `solved_reward` of the environment, and `factor * min(0, l)` to any other. Nothing if all are as long.
    """

    type: Literal["relative"] = "relative"
    factor: PositiveFloat = 0.1


class Cost(Section):
    """What a group that succeeds spends (prime-rl's): the better it does, the more its longest traces lose.

    Takes `p * (tokens * n / max n + turns * t / max t)`: t is the number of turns, p the group's mean reward cut to
    [0, 1], and max the largest in the group, all over the traces of the same agent.
    """

    type: Literal["cost"] = "cost"
    tokens: float = Field(0.25, ge=0)
    turns: float = Field(0.1, ge=0)


LengthPenalty = Annotated[Overlong | Relative | Cost, Field(discriminator="type")]
