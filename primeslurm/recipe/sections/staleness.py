"""Handling of rollouts older than `max_off_policy_steps`, and of stragglers."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from primeslurm.recipe.fields.section import Section

StaleRule = Literal["drop", "mask", "partial", "carry"]
SurplusRule = Literal["cancel", "carry"]


class Staleness(Section):
    """Handling of groups older than `max_off_policy_steps`, and of groups with a straggler."""

    renamed = {"at_least": "min_rollouts"}

    rule: StaleRule = "drop"
    """drop: discard the group and sample its example again; if the second group also becomes too old, finish it as with
    carry. mask: finish the group and use tokens that are too old as context only. partial: just before the group
    becomes too old, train its finished rollouts if there are at least `min_rollouts`, else drop. carry: as partial, but
    unfinished rollouts continue in another group of the same example. See how-to/long-rollouts."""
    min_rollouts: PositiveInt = 2
    """Smallest number of rollouts that may be trained as a group when not all are finished."""
    extra_rollouts: NonNegativeInt = 0
    """Rollouts that each group starts beyond `group_size`. The first ones to finish form the group, so stragglers do
    not delay it."""
    surplus: SurplusRule = "cancel"
    """Handling of unfinished rollouts beyond `group_size`. cancel: stop them. carry: move them to another group of the
    same example."""

    @property
    def counts_tokens(self) -> bool:
        """True if the age of each token counts, instead of the age of its group."""
        return self.rule in ("mask", "carry")
