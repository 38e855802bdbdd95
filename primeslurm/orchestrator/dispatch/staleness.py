"""The rule by which a group is too old to be trained (`orchestrator.max_off_policy_steps`, `orchestrator.staleness`).

Step s trains the policy of version s-1. With `max_off_policy_steps` = n it may train groups back to version s-1-n. The
rule of `orchestrator.staleness` says which version of a group counts:

- drop, partial: the version at which the group opened.
- mask, carry: the newest version that sampled one of its tokens. Tokens that are too old are masked when the batch is
  packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from primeslurm.orchestrator.dispatch.group_queues import group_id
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.staleness import Staleness


@dataclass(frozen=True)
class AgeLimit:
    """The rule that decides when a group is too old to be trained. Age counts policy versions, not seconds."""

    max_off_policy_steps: int
    staleness: Staleness = field(default_factory=Staleness)
    # True for an example that is sampled for the second time, because its first group became too old
    was_returned: Callable[[tuple[str, int]], bool] = lambda position: False

    def oldest_version(self, step: int) -> int:
        """Return the oldest version of a group that `step` may train."""
        return step - 1 - self.max_off_policy_steps

    def finishes_late(self, environment: str, example: int, name: str) -> bool:
        """Tell whether a group's running rollouts continue when the group becomes too old."""
        # An example whose rollouts take longer than the limit would be sampled again forever. So rollouts of a
        # continuation, and of an example that was returned before, continue under every rule.
        is_continuation = name != group_id(environment, example)
        return self.staleness.rule == "carry" or is_continuation or self.was_returned((environment, example))

    def version_of(self, group: RolloutGroup) -> int:
        """Return the version from which the age of a complete group counts."""
        if self.staleness.counts_tokens or self.finishes_late(group.environment, group.example, group.id):
            return group.newest_version
        return group.opened_version

    def is_too_old(self, group: RolloutGroup, step: int) -> bool:
        """Tell whether `step` must not train a complete group."""
        return self.version_of(group) < self.oldest_version(step)

    def is_last_chance(self, group: RolloutGroup, step: int) -> bool:
        """Tell whether no later step than `step` may train a complete group."""
        return self.version_of(group) <= self.oldest_version(step)
