"""What becomes of rollouts that take longer than the policy stays."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from primeslurm.recipe.fields.section import Section

StaleRule = Literal["drop", "mask", "partial", "carry"]
SurplusRule = Literal["cancel", "carry"]


class Staleness(Section):
    """Groups that get older than `max_off_policy_steps` allows, and groups with a straggler."""

    rule: StaleRule = "drop"
    """drop: the group is given up, and its example comes again; if that gets too old, too, it goes on as with carry, so
    that no example is given up for ever. mask: age counts from each token: the group is finished, and tokens that are
    too old when it is trained are context only. partial: the group is trained with the rollouts that are done at its
    last chance, if they are `at_least` so many, else as with drop; advantages are relative to these. carry: as partial,
    but rollouts that still run go on in another group of the same example, or in theirs, if too few are done; tokens
    are masked as with mask. Batches are as full as with whole groups: they hold more of smaller ones."""
    at_least: PositiveInt = 2
    """Fewest rollouts that are trained as a group where not all are done. If fewer are carried into another one, new
    ones are begun."""
    extra_rollouts: NonNegativeInt = 0
    """Rollouts of each group beyond `group_size`. The first that finish are its group: nobody waits for stragglers."""
    surplus: SurplusRule = "cancel"
    """What becomes of the others: cancel, or carry them into another group of the same example: of as many as they are,
    or `at_least`. Every example is trained with them: if that group gets too old, it goes on."""

    @property
    def counts_tokens(self) -> bool:
        """Tell whether age counts from each token, not from a group's opening."""
        return self.rule in ("mask", "carry")
