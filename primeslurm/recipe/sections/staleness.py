"""What becomes of rollouts that take longer than the policy stays."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from primeslurm.recipe.fields.section import Section

StaleRule = Literal["drop", "mask", "partial", "carry"]
SurplusRule = Literal["cancel", "carry"]


class Staleness(Section):
    """How to handle groups older than `max_off_policy_steps`, and groups with a straggler."""

    rule: StaleRule = "drop"
    """drop: discard the group and sample its example again; if the second group becomes too old as well, finish it as
    with carry. mask: finish the group and use tokens that are too old as context only. partial: train the rollouts that
    are finished at the last chance, if there are `at_least` of them, else drop. carry: as partial, but unfinished
    rollouts continue in another group of the same example. See how-to/long-rollouts."""
    at_least: PositiveInt = 2
    """Smallest number of rollouts that may be trained as a group when not all are finished."""
    extra_rollouts: NonNegativeInt = 0
    """Rollouts that each group starts beyond `group_size`. The first ones to finish form the group, so stragglers do
    not delay it."""
    surplus: SurplusRule = "cancel"
    """What to do with the rollouts beyond `group_size`. cancel: stop them. carry: move them to another group of the
    same example."""

    @property
    def counts_tokens(self) -> bool:
        """Tell whether age counts from each token, not from a group's opening."""
        return self.rule in ("mask", "carry")
