"""Groups that are not complete, and what becomes of one that gets too old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.rollout import Rollout


@dataclass
class OpenGroup:
    """A group that is not complete."""

    id: str
    environment: str
    example: int
    version: int
    router: str
    """Of the replica that its rollouts go to if there is room."""
    size: int
    """Rollouts that complete it."""
    to_dispatch: list[int]
    """Indices of rollouts that no job runs now."""
    task: int | None
    """Index in the taskset, where a curriculum has drawn it; None: what the stream has at `example`."""
    part: int = 0
    """Above 0: rollouts of an earlier group of the same example go on in it, which was completed without them."""
    jobs: dict[str, int] = field(default_factory=dict)
    """Of its rollouts that run: index by job."""
    done: dict[int, tuple[Rollout, ...]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    engine_failures: Counter[int] = field(default_factory=Counter)
    """How often no engine answered each of its rollouts."""
    finished: list[str] = field(default_factory=list)
    """Jobs whose rollouts are done."""
    order: int = 0
    """Greater than those of the groups that were opened before."""

    def complete(self) -> RolloutGroup:
        """Return it with the rollouts that are done, in the order of their indices."""
        rollouts = tuple(self.done[index] for index in sorted(self.done))
        return RolloutGroup(self.id, self.environment, self.example, self.version, rollouts, task=self.task)

    def successor(self, part: int, version: int, least: int) -> OpenGroup:
        """Return a group of the same example that goes on with the rollouts that run. This one has none then.

        As many complete it as this one lacks, so that the example is trained no more often than others; if this one
        lacks none, all of them.

        Args:
            part: what tells it apart from the groups of the example before.
            version: at which it opens.
            least: rollouts that complete it at least.
        """
        indices = sorted(self.jobs.values())
        renumbered = {old: new for new, old in enumerate(indices)}
        jobs = {job: renumbered[index] for job, index in self.jobs.items()}
        tries = Counter({renumbered[index]: count for index, count in self.tries.items() if index in renumbered})
        size = max(least, self.size - len(self.done) or len(jobs))
        new = list(range(len(jobs), size))
        name = group_id(self.environment, self.example, part)
        self.jobs = {}
        return OpenGroup(
            *(name, self.environment, self.example, version, self.router, size, new, self.task, part),
            jobs=jobs,
            tries=tries,
        )


class OpenGroups(Mapping[str, OpenGroup]):
    """Groups by id, in the order in which they were opened.

    What is asked whenever a rollout ends is not looked for in thousands of groups: which of them have rollouts to
    dispatch, and how many rollouts those are that are fresh enough.
    """

    def __init__(self) -> None:
        self._groups: dict[str, OpenGroup] = {}
        self._undispatched: dict[str, OpenGroup] = {}
        self._by_version: Counter[int] = Counter()
        """Rollouts that complete the groups that were opened at a version."""
        self._opened = 0

    def __getitem__(self, name: str) -> OpenGroup:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def values(self) -> ValuesView[OpenGroup]:
        """Return the groups."""
        return self._groups.values()

    def add(self, group: OpenGroup) -> None:
        """Open a group."""
        group.order = self._opened
        self._opened += 1
        self._groups[group.id] = group
        self._by_version[group.version] += group.size
        self._note(group)

    def remove(self, group: OpenGroup) -> None:
        """Close a group."""
        del self._groups[group.id]
        self._undispatched.pop(group.id, None)
        self._count(group, -group.size)

    def reopen_at(self, group: OpenGroup, version: int) -> None:
        """Have a group count as opened at another version."""
        self._count(group, -group.size)
        group.version = version
        self._count(group, group.size)

    def again(self, group: OpenGroup, index: int) -> None:
        """Have a rollout of a group dispatched, after those of it that wait already."""
        group.to_dispatch.append(index)
        self._note(group)

    def grow(self, group: OpenGroup) -> None:
        """Have a group take one rollout more to be complete."""
        self._count(group, 1)
        group.to_dispatch.append(group.size)
        group.size += 1
        self._note(group)

    def take(self, group: OpenGroup) -> int:
        """Take the next of a group's rollouts that is to be dispatched."""
        index = group.to_dispatch.pop(0)
        self._note(group)
        return index

    def next(
        self, available: Collection[str], routers: Collection[str] | None = None, patience: int = 0
    ) -> OpenGroup | None:
        """Find the group that was opened first of those that have rollouts to dispatch.

        Args:
            available: labels of the environments that it may be of.
            routers: of the replicas that it may be at, unless more than `patience` groups were opened after it; None:
                it may be at any.
            patience: so many groups.
        """
        old = self._opened - patience
        waiting = (
            group
            for group in self._undispatched.values()
            if group.environment in available and (routers is None or group.router in routers or group.order < old)
        )
        return min(waiting, key=lambda group: group.order, default=None)

    def pending(self, oldest: int) -> int:
        """Count the rollouts that complete all groups that were opened at a version, or later."""
        return sum(rollouts for version, rollouts in self._by_version.items() if version >= oldest)

    def before(self, version: int) -> list[OpenGroup]:
        """Find the groups that were opened before a version."""
        if all(version <= other for other in self._by_version):
            return []
        return [group for group in self._groups.values() if group.version < version]

    def at(self, version: int) -> int:
        """Count the rollouts that complete all groups that were opened at a version."""
        return self._by_version[version]

    def _note(self, group: OpenGroup) -> None:
        if group.to_dispatch:
            self._undispatched[group.id] = group
        else:
            self._undispatched.pop(group.id, None)

    def _count(self, group: OpenGroup, rollouts: int) -> None:
        self._by_version[group.version] += rollouts
        if not self._by_version[group.version]:
            del self._by_version[group.version]


def group_id(label: str, example: int, part: int = 0) -> str:
    """Return the id of a group: the same after a restart."""
    return f"{label}-{example:08d}" + (f".{part}" if part else "")
