"""Limits of dispatch: the rollouts ahead of the trainer, and the slots of each replica. Pure.

The limit on the age of a group is in `orchestrator.dispatch.staleness`.

Limits count rollouts, because environments may have different group sizes. Each size divides the next larger one and
the batch (`recipe.rules.environments`), so complete groups always fill a batch exactly. Groups that completed early, or
lost rollouts to a filter, have any size: a batch may then exceed its size by less than one group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, group_id
from primeslurm.orchestrator.dispatch.staleness import AgeLimit
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


def choose_groups(sizes: Sequence[int], total: int) -> list[int]:
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


class ReplicaSlots:
    """Rollouts per replica, against the limit of each. A replica is named by its router."""

    def __init__(self, routers: Iterable[str]) -> None:
        # Rollouts in flight
        self.load: dict[str, int] = dict.fromkeys(routers, 0)
        # Rollouts that have ended
        self.ended: Counter[str] = Counter()
        # Largest load. Empty: replicas have no limit of their own.
        self.limits: Mapping[str, int] = {}
        self._router_of: dict[str, str] = {}

    @property
    def routers(self) -> list[str]:
        return list(self.load)

    @property
    def with_free_slots(self) -> set[str]:
        return {router for router in self.load if self._free(router) > 0}

    def least_loaded(self) -> str:
        """Return the replica with the most free slots; without limits, the one with the fewest rollouts."""
        return min(self.load, key=lambda router: (-self._free(router), self.load[router]))

    def assign(self, job: str, preferred: str) -> str:
        """Assign a job to its preferred replica if that has a free slot, else to the least loaded one."""
        router = preferred if self._free(preferred) > 0 else self.least_loaded()
        self.add(job, router)
        return router

    def add(self, job: str, router: str) -> None:
        """Count a job that already runs on a replica."""
        self._router_of[job] = router
        self.load[router] += 1

    def release(self, job: str) -> None:
        router = self._router_of.pop(job)
        if router in self.load:
            self.load[router] -= 1
            self.ended[router] += 1

    def drop(self, router: str) -> list[str]:
        """Remove a replica, and return the jobs that ran on it."""
        del self.load[router]
        return sorted(job for job, assigned in self._router_of.items() if assigned == router)

    def _free(self, router: str) -> float:
        return self.limits.get(router, 0) - self.load[router] if self.limits else math.inf
