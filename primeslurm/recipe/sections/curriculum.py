"""Which example of an environment comes next."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt

from primeslurm.recipe.fields.section import Section


class Shares(Section):
    """How often a pool is drawn from, relative to the others that are not empty. 0: only if all of those are."""

    unseen: NonNegativeFloat = 1.0
    """Examples that no group was finished of."""
    easy: NonNegativeFloat = 0.2
    normal: NonNegativeFloat = 1.0
    hard: NonNegativeFloat = 0.2


class Curriculum(Section):
    """Draws examples by how often the policy solves them. Their pools and rates outlive the job."""

    shares: Shares = Shares()
    easy: float = Field(0.75, gt=0, le=1)
    """Solve rate from which an example is easy."""
    hard: float = Field(0.25, ge=0, lt=1)
    """Solve rate up to which it is hard; what is neither is normal."""
    alpha: float = Field(0.5, gt=0, le=1)
    """Weight of the newest group in an example's solve rate: `rate += alpha * (solved share of the group - rate)`. The
    first group is the rate; 1: so is the newest."""
    retire_solved: PositiveInt | None = None
    """An example is drawn no more once all rollouts of so many groups of it in a row have solved it. Default: never."""
    retire_failed: PositiveInt | None = None
    """An example is drawn no more once none of the rollouts of so many groups of it in a row has. Default: never."""
