"""How much runs ahead, and which groups make a batch. Both are counted in rollouts, as groups may differ in size.

Each size divides the next larger one and the batch (`recipe.environment_rules`). Then any groups that hold a batch's
number of rollouts or more have some among them that hold exactly that number. Groups that were completed early, or of
which filters left some, have any size: where none of them hold exactly so many, a batch is larger by less than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from primeslurm.recipe.sections.staleness import Staleness


@dataclass(frozen=True)
class DispatchLimits:
    """What the recipe says about dispatch."""

    group_sizes: Mapping[str, int]
    """Rollouts of a group, by environment label."""
    batch_size: int
    max_inflight: int
    max_off_policy_steps: int
    max_steps: int
    ratios: Mapping[str, float]
    """Share of the groups by environment label."""
    oversampling: float = 1.0
    """Of the rollouts of open groups, one in so many is expected to be trained."""
    staleness: Staleness = field(default_factory=Staleness)
    """What becomes of groups that get too old, and of stragglers."""

    @property
    def ahead(self) -> int:
        """Return how many rollouts may wait for the trainer, counting those that will after its next step.

        One batch beyond the one being filled keeps the trainer busy; with a slow trainer, more would only grow older.
        """
        return 2 * self.batch_size

    def oldest_version(self, step: int) -> int:
        """Return the oldest version at which a group of `step`'s batch may have been opened."""
        return step - 1 - self.max_off_policy_steps

    def may_open(self, label: str, step: int, version: int, ready: int, pending: int, landing: float) -> bool:
        """Tell whether a group of an environment may open.

        Args:
            label: of the environment.
            step: whose batch is formed next.
            version: at which the group would open.
            ready: rollouts of complete groups that are kept.
            pending: rollouts of open groups.
            landing: those of them in groups that are expected to be complete after the trainer's next step.
        """
        size = self.group_sizes[label]
        if ready + int(landing / self.oversampling) + size > self.ahead:
            return False
        before = ready + int(pending / self.oversampling)
        room = self.batch_size - before % self.batch_size
        fits = room >= min(self.group_sizes.values())  # else this batch is larger by what does not fit
        lands_in = step + (before + (size if fits else 1) - 1) // self.batch_size
        return lands_in <= self.max_steps and version >= self.oldest_version(lands_in)


def choose(sizes: Sequence[int], total: int) -> list[int]:
    """Choose groups that hold `total` rollouts, or as few more as there can be: the first wherever there is a choice.

    Returns:
        Indices into `sizes`, ascending; none if all of them hold fewer.
    """
    within = (1 << total + max(sizes, default=0)) - 1  # without any one of its groups the choice holds too few
    reachable = [1]  # bit n: the groups from here on can hold n rollouts
    for size in reversed(sizes):
        reachable.append((reachable[-1] | reachable[-1] << size) & within)
    enough = reachable.pop() >> total
    if not enough:
        return []
    total += (enough & -enough).bit_length() - 1  # the lowest bit
    chosen = []
    for index, size in enumerate(sizes):
        rest = reachable.pop()
        if total >= size and rest >> (total - size) & 1:
            chosen.append(index)
            total -= size
    return chosen
