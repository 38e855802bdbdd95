"""Bounds the rollouts that are ahead of the trainer, and chooses the groups that fill a batch.

Both count rollouts, because environments may have different group sizes. Each size divides the next larger one and the
batch (`recipe.rules.environments`), so complete groups always fill a batch exactly. Groups that completed early, or
lost rollouts to a filter, have any size: a batch may then exceed its size by less than one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from primeslurm.orchestrator.dispatch.age_limit import AgeLimit
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, group_id
from primeslurm.recipe.sections.staleness import Staleness


@dataclass(frozen=True)
class DispatchLimits:
    """The recipe's fields about dispatch."""

    group_sizes: Mapping[str, int]  # Rollouts per group, by environment label
    batch_size: int
    max_inflight: int
    max_off_policy_steps: int
    max_steps: int
    ratios: Mapping[str, float]  # Share of the groups, by environment label
    oversampling: float = 1.0  # Open this many rollouts for each one that is expected to be trained
    staleness: Staleness = field(default_factory=Staleness)

    @property
    def max_ahead(self) -> int:
        """Return how many rollouts may wait for the trainer, including those that complete during its next step."""
        # One batch beyond the one being filled keeps the trainer busy. With a slow trainer, more would only get older.
        return 2 * self.batch_size

    @property
    def age_limit(self) -> AgeLimit:
        """Return the age limit of groups whose example was not returned before."""
        return AgeLimit(self.max_off_policy_steps, self.staleness)

    def new_group(self, label: str, example: int, version: int, router: str, task: int | None) -> OpenGroup:
        """Return a new group of an example, with the extra rollouts of the recipe."""
        size = self.group_sizes[label]
        members = list(range(size + self.staleness.extra_rollouts))
        return OpenGroup(group_id(label, example), label, example, version, router, size, members, task)

    def may_open(self, label: str, step: int, version: int, ready: int, pending: int, landing: float) -> bool:
        """Tell whether an environment may open a group at a policy version, while the batch of `step` is formed.

        `ready` rollouts wait for the trainer, and `pending` ones are in open groups. `landing` of these are expected to
        complete during the trainer's next step.
        """
        size = self.group_sizes[label]
        if ready + int(landing / self.oversampling) + size > self.max_ahead:
            return False
        # The group is expected in the batch that the groups before it leave room in.
        before = ready + int(pending / self.oversampling)
        room = self.batch_size - before % self.batch_size
        fits = room >= min(self.group_sizes.values())  # else this batch exceeds its size instead
        expected_step = step + (before + (size if fits else 1) - 1) // self.batch_size
        return expected_step <= self.max_steps and version >= self.age_limit.oldest_version(expected_step)


def choose(sizes: Sequence[int], total: int) -> list[int]:
    """Choose groups that hold `total` rollouts, or as few more as possible; among equals, the first ones.

    Returns:
        Ascending indices into `sizes`. Empty if all groups together hold fewer than `total`.
    """
    # Subset sums as bit sets: bit n says that the groups from an index on can hold n rollouts. Without any one of its
    # groups the best choice holds too few, so larger sums are cut off.
    mask = (1 << total + max(sizes, default=0)) - 1
    reachable = [1]
    for size in reversed(sizes):
        reachable.append((reachable[-1] | reachable[-1] << size) & mask)
    enough = reachable.pop() >> total
    if not enough:
        return []
    total += (enough & -enough).bit_length() - 1  # the lowest bit is the smallest sum
    chosen = []
    for index, size in enumerate(sizes):
        rest = reachable.pop()
        if total >= size and rest >> (total - size) & 1:
            chosen.append(index)
            total -= size
    return chosen
