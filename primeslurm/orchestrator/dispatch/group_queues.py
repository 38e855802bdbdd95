"""The groups that are being sampled (`OpenGroups`), and the complete ones that wait for a batch (`ReadyGroups`).

Both answer what the dispatcher asks at the end of every rollout from running totals: a run has thousands of groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.rollout import Rollout


@dataclass
class OpenGroup:
    """A group whose rollouts are not all finished."""

    id: str
    environment: str
    example: int  # Position in the environment's stream
    version: int  # Policy version from which its age counts
    router: str  # Preferred replica, whose cache holds the prompt
    size: int  # Number of finished rollouts that complete it
    to_dispatch: list[int]  # Indices of the rollouts that have no job
    task: int | None  # Index in the taskset if a curriculum drew it. None: the stream's task at `example`.
    # Above 0: it continues rollouts of an earlier group of the same example, which completed without them
    continuation: int = 0
    jobs: dict[str, int] = field(default_factory=dict)  # Index of each running rollout, by job
    done: dict[int, tuple[Rollout, ...]] = field(default_factory=dict)  # Finished rollouts by index
    failures: Counter[int] = field(default_factory=Counter)  # Failures of each rollout, except those of engines
    engine_failures: Counter[int] = field(default_factory=Counter)
    finished_jobs: list[str] = field(default_factory=list)
    order: int = 0  # Number of groups that were opened before it

    def complete(self) -> RolloutGroup:
        """Return the group with its finished rollouts, in the order of their indices."""
        rollouts = tuple(self.done[index] for index in sorted(self.done))
        return RolloutGroup(self.id, self.environment, self.example, self.version, rollouts, task=self.task)

    def continue_as(self, continuation: int, version: int, min_size: int) -> OpenGroup:
        """Move the running rollouts to a new group of the same example."""
        # The new group completes with as many rollouts as this one lacks, so that the example is trained no more often
        # than others. If this one lacks none, it completes with all of them.
        indices = sorted(self.jobs.values())
        renumbered = {old: new for new, old in enumerate(indices)}
        jobs = {job: renumbered[index] for job, index in self.jobs.items()}
        failures = Counter({renumbered[index]: n for index, n in self.failures.items() if index in renumbered})
        size = max(min_size, self.size - len(self.done) or len(jobs))
        self.jobs = {}
        return OpenGroup(
            id=group_id(self.environment, self.example, continuation),
            environment=self.environment,
            example=self.example,
            version=version,
            router=self.router,
            size=size,
            to_dispatch=list(range(len(jobs), size)),
            task=self.task,
            continuation=continuation,
            jobs=jobs,
            failures=failures,
        )


class OpenGroups(Mapping[str, OpenGroup]):
    """Open groups by id, in the order in which they were opened."""

    def __init__(self) -> None:
        self._groups: dict[str, OpenGroup] = {}
        self._undispatched: dict[str, OpenGroup] = {}
        # Sum of the sizes of the groups of each version
        self._rollouts: Counter[int] = Counter()
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
        return self._groups.values()

    def add(self, group: OpenGroup) -> None:
        group.order = self._opened
        self._opened += 1
        self._groups[group.id] = group
        self._rollouts[group.version] += group.size
        self._index(group)

    def remove(self, group: OpenGroup) -> None:
        del self._groups[group.id]
        self._undispatched.pop(group.id, None)
        self._count(group, -group.size)

    def set_version(self, group: OpenGroup, version: int) -> None:
        """Count the age of a group from another version."""
        self._count(group, -group.size)
        group.version = version
        self._count(group, group.size)

    def redispatch(self, group: OpenGroup, index: int) -> None:
        group.to_dispatch.append(index)
        self._index(group)

    def grow(self, group: OpenGroup) -> None:
        self._count(group, 1)
        group.to_dispatch.append(group.size)
        group.size += 1
        self._index(group)

    def take(self, group: OpenGroup) -> int:
        index = group.to_dispatch.pop(0)
        self._index(group)
        return index

    def next(
        self, available: Collection[str], routers: Collection[str] | None = None, wait_groups: int = 0
    ) -> OpenGroup | None:
        """Return the oldest group of the `available` environments that has rollouts to dispatch.

        With `routers`, the replicas with free slots, a group of another replica is passed over until `wait_groups`
        groups were opened after it.
        """
        overdue = self._opened - wait_groups
        candidates = (
            group
            for group in self._undispatched.values()
            if group.environment in available and (routers is None or group.router in routers or group.order < overdue)
        )
        return min(candidates, key=lambda group: group.order, default=None)

    def pending(self, oldest: int) -> int:
        """Return the number of rollouts of the groups of version `oldest` or newer."""
        return sum(rollouts for version, rollouts in self._rollouts.items() if version >= oldest)

    def before(self, version: int) -> list[OpenGroup]:
        if all(version <= other for other in self._rollouts):
            return []
        return [group for group in self._groups.values() if group.version < version]

    def at(self, version: int) -> int:
        return self._rollouts[version]

    def _index(self, group: OpenGroup) -> None:
        if group.to_dispatch:
            self._undispatched[group.id] = group
        else:
            self._undispatched.pop(group.id, None)

    def _count(self, group: OpenGroup, rollouts: int) -> None:
        self._rollouts[group.version] += rollouts
        if not self._rollouts[group.version]:
            del self._rollouts[group.version]


class ReadyGroups(Iterable[RolloutGroup]):
    """Complete groups that wait for a batch. `version_of` returns the version from which the age of a group counts."""

    def __init__(self, version_of: Callable[[RolloutGroup], int]) -> None:
        # Number of rollouts of all groups
        self.rollouts = 0
        self._version_of = version_of
        self._groups: list[RolloutGroup] = []
        self._by_version: Counter[int] = Counter()

    def __iter__(self) -> Iterator[RolloutGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: RolloutGroup) -> None:
        self._groups.append(group)
        self._count(group, 1)

    def put_back(self, groups: Iterable[RolloutGroup]) -> None:
        groups = list(groups)
        self._groups[:0] = groups
        for group in groups:
            self._count(group, 1)

    def remove(self, groups: Iterable[RolloutGroup]) -> None:
        removed = {id(group) for group in groups}
        for group in self._groups:
            if id(group) in removed:
                self._count(group, -1)
        self._groups = [group for group in self._groups if id(group) not in removed]

    def replace(self, group: RolloutGroup, loaded: RolloutGroup) -> None:
        self._groups = [loaded if each is group else each for each in self._groups]

    def before(self, version: int) -> list[RolloutGroup]:
        if all(version <= other for other in self._by_version):
            return []
        return [group for group in self._groups if self._version_of(group) < version]

    def sort(self) -> None:
        """Sort by the version at which groups opened; those of one version keep their order of completion."""
        self._groups.sort(key=lambda group: group.opened_version)

    def _count(self, group: RolloutGroup, sign: int) -> None:
        version = self._version_of(group)
        self.rollouts += sign * group.size
        self._by_version[version] += sign
        if not self._by_version[version]:
            del self._by_version[version]


def group_id(environment: str, example: int, continuation: int = 0) -> str:
    """Return the id of a group, which is the same after a restart."""
    return f"{environment}-{example:08d}" + (f".{continuation}" if continuation else "")
