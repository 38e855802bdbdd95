"""Order of an environment's examples by difficulty."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from primeslurm.recipe.fields.section import Section


class Shares(Section):
    """Weights of the pools from which examples are drawn. Only pools that are not empty count.

    0: draw from this pool only if all others are empty.
    """

    unseen: NonNegativeFloat = 1.0
    """Weight of examples without a finished group."""
    easy: NonNegativeFloat = 0.2
    """Weight of examples with a high solve rate."""
    normal: NonNegativeFloat = 1.0
    """Weight of examples with a medium solve rate."""
    hard: NonNegativeFloat = 0.2
    """Weight of examples with a low solve rate."""


class Curriculum(Section):
    """Draws examples by how often the policy solves them. Solve rates are kept when the job restarts."""

    shares: Shares = Shares()
    """Weight of each pool of examples."""
    easy: float = Field(0.75, gt=0, le=1)
    """An example with this solve rate or more is easy."""
    hard: float = Field(0.25, ge=0, lt=1)
    """An example with this solve rate or less is hard. Examples between `hard` and `easy` are normal."""
    alpha: float = Field(0.5, gt=0, le=1)
    """Weight of the newest group in an example's solve rate: `rate += alpha * (solved fraction of the group - rate)`.
    1: only the newest group counts."""
    retire_solved: PositiveInt | None = None
    """Stop drawing an example after this many groups in a row whose rollouts all solved it. Default: never."""
    retire_failed: PositiveInt | None = None
    """Stop drawing an example after this many groups in a row without a rollout that solved it. Default: never."""
