"""Complete groups that wait for a batch, oldest versions first when one is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from primeslurm.orchestrator.rollouts.groups import RolloutGroup


class ReadyGroups(Sequence[RolloutGroup]):
    """What is asked whenever a rollout ends is not summed up anew: how many rollouts they have, and how old they are.

    Args:
        age: the version that a group's staleness counts from.
    """

    def __init__(self, age: Callable[[RolloutGroup], int]) -> None:
        self.rollouts = 0
        """Of all of them."""
        self._age = age
        self._groups: list[RolloutGroup] = []
        self._by_age: Counter[int] = Counter()

    @overload
    def __getitem__(self, index: int) -> RolloutGroup: ...

    @overload
    def __getitem__(self, index: slice) -> list[RolloutGroup]: ...

    def __getitem__(self, index: int | slice) -> RolloutGroup | list[RolloutGroup]:
        return self._groups[index]

    def __iter__(self) -> Iterator[RolloutGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: RolloutGroup) -> None:
        """Have a group wait, after the others."""
        self._groups.append(group)
        self._count(group, 1)

    def put_back(self, groups: Iterable[RolloutGroup]) -> None:
        """Have groups wait before all others."""
        groups = list(groups)
        self._groups[:0] = groups
        for group in groups:
            self._count(group, 1)

    def take(self, groups: Iterable[RolloutGroup]) -> None:
        """Have groups wait no longer."""
        gone = {id(group) for group in groups}
        for group in self._groups:
            if id(group) in gone:
                self._count(group, -1)
        self._groups = [group for group in self._groups if id(group) not in gone]

    def replace(self, group: RolloutGroup, other: RolloutGroup) -> None:
        """Have another group wait in the place of one, if that waits: the same one, read from disk."""
        self._groups = [other if each is group else each for each in self._groups]

    def before(self, version: int) -> list[RolloutGroup]:
        """Find the groups that are older than a version."""
        if all(version <= age for age in self._by_age):
            return []
        return [group for group in self._groups if self._age(group) < version]

    def sort(self) -> None:
        """Put those first that were opened first; equal versions stay in order of completion."""
        self._groups.sort(key=lambda group: group.opened_version)

    def _count(self, group: RolloutGroup, sign: int) -> None:
        age = self._age(group)
        self.rollouts += sign * group.size
        self._by_age[age] += sign
        if not self._by_age[age]:
            del self._by_age[age]
