"""Which rollout runs next, under which policy version, and which are too old: a pure state machine.

Rollouts are dispatched in groups. A group pins its replica and its policy version when it opens. Its staleness counts
from there: step s takes only groups opened at versions >= s-1-max_off_policy_steps. The gate keeps groups from being
opened that would become too old: a new group is expected in the batch that the groups before it leave room in.

Every dispatched job ends in exactly one of the counters finished, failed, cancelled, lost, or is in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from primeslurm.orchestrator.dispatch.limits import Limits, choose
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.wire.rollouts import Rollout

MAX_TRIES = 3
"""Failures of one rollout after which its group is given up. Lost jobs (their worker died) do not count."""


@dataclass
class OpenGroup:
    """A group that is not complete."""

    id: str
    environment: str
    example: int
    version: int
    router: str
    to_dispatch: list[int]
    """Indices of rollouts that no job runs now."""
    task: int | None
    """Index in the taskset, where a curriculum has drawn it; None: what the stream has at `example`."""
    done: dict[int, tuple[Rollout, ...]] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)


class Draws(Protocol):
    """Says which task an environment's next group is of."""

    def draw(self, label: str, position: int, running: Collection[int]) -> int | None:
        """Draw a task.

        Args:
            label: of the environment.
            position: of the group in the environment's stream.
            running: tasks of its open groups.

        Returns:
            The task's index in the taskset; None: the one that the stream has at `position`.
        """
        ...


class _InOrder:
    """Leaves the order to the streams."""

    def draw(self, label: str, position: int, running: Collection[int]) -> int | None:
        return None


class Dispatcher:
    """See the module docstring.

    Args:
        salt: prefix of every cache salt, `<run id>.<attempt>`.
        incarnation: makes job ids unique over restarts of the orchestrator.
        cursors: next position in each environment's task stream.
        unfinished: positions before the cursors whose groups never finished; they are opened first.
        taken: ids of groups that exist already (finished or trained) and must not be opened again.
        draws: of the tasks that groups are of; each environment's own order without it.
        drawn: tasks of the unfinished groups, by group id, as `drawn` was before a restart.
    """

    def __init__(
        self,
        limits: Limits,
        routers: Sequence[str],
        salt: str,
        incarnation: str,
        step: int = 1,
        cursors: dict[str, int] | None = None,
        unfinished: Iterable[tuple[str, int]] = (),
        taken: Collection[str] = (),
        draws: Draws | None = None,
        drawn: Mapping[str, int] | None = None,
    ) -> None:
        self.limits = limits
        self.step = step
        self.version = -1
        self.counts: Counter[str] = Counter()
        self.ready: list[RolloutGroup] = []
        self.open: dict[str, OpenGroup] = {}
        self.unscored: dict[str, RolloutGroup] = {}
        """Complete groups that wait for the teacher."""
        self._routers = list(routers)
        self._salt = salt
        self.incarnation = incarnation
        self._cursors = {label: (cursors or {}).get(label, 0) for label in limits.ratios}
        self._unfinished = [(label, example) for label, example in unfinished if label in limits.ratios]
        self._taken = set(taken)
        self._draws: Draws = draws or _InOrder()
        self._drawn = dict(drawn or {})
        self._jobs: dict[str, tuple[str, int]] = {}
        self._serial = count()

    @property
    def inflight(self) -> int:
        """Return how many jobs were dispatched and have not ended."""
        return len(self._jobs)

    @property
    def cursors(self) -> dict[str, int]:
        """Return the next position in each environment's task stream."""
        return dict(self._cursors)

    @property
    def unfinished(self) -> list[tuple[str, int]]:
        """Return the positions before the cursors whose groups are not finished."""
        return [*((group.environment, group.example) for group in self.open.values()), *self._unfinished]

    @property
    def drawn(self) -> dict[str, int]:
        """Return the tasks that were drawn for unfinished groups, by group id."""
        drawn = {group.id: group.task for group in self.open.values() if group.task is not None}
        return drawn | self._drawn

    @property
    def ready_rollouts(self) -> int:
        """Return how many rollouts of a batch the groups that wait for one fill."""
        return self._rollouts(self.ready)

    def runs(self, job: str) -> bool:
        """Tell whether a job is in flight."""
        return job in self._jobs

    def next_job(self, available: Collection[str]) -> Job | None:
        """Dispatch the next job.

        Args:
            available: labels of the environments that have a worker.

        Returns:
            None if nothing may start now.
        """
        if self.version < 0 or self.inflight >= self.limits.max_inflight:
            return None
        group = next((g for g in self.open.values() if g.to_dispatch and g.environment in available), None)
        group = group or self._open(available)
        return self._dispatch(group) if group else None

    @property
    def routers(self) -> tuple[str, ...]:
        """Return the routers that groups are pinned to."""
        return tuple(self._routers)

    def finished(self, job: str, rollout: tuple[Rollout, ...]) -> RolloutGroup | None:
        """Take the rollout that a job made.

        Returns:
            Its group, if that completed it.

        Raises:
            KeyError: the job is not in flight.
        """
        group, index = self._end(job, "finished")
        group.done[index] = rollout
        size = self.limits.group_sizes[group.environment]
        if len(group.done) < size:
            return None
        del self.open[group.id]
        rollouts = tuple(group.done[i] for i in range(size))
        return RolloutGroup(group.id, group.environment, group.example, group.version, rollouts, task=group.task)

    def failed(self, job: str) -> list[str]:
        """Try the rollout of a failed job again, or give up its group.

        Returns:
            The jobs to cancel, if the group was given up.
        """
        group, index = self._end(job, "failed")
        group.tries[index] += 1
        if group.tries[index] >= MAX_TRIES:
            return self._drop(group, "failed")
        group.to_dispatch.append(index)
        return []

    def lost(self, job: str) -> None:
        """Dispatch a job again, as what ran it is gone."""
        group, index = self._end(job, "lost")
        group.to_dispatch.append(index)

    def drop_router(self, router: str) -> list[str]:
        """Have the open groups of a replica that is gone go on with the others.

        Returns:
            The jobs to cancel; they are dispatched again.
        """
        self._routers.remove(router)
        moved = {group.id for group in self.open.values() if group.router == router}
        for name in sorted(moved):
            self.open[name].router = self._least_loaded()
        jobs = [job for job, (owner, _) in self._jobs.items() if owner in moved]
        for job in jobs:
            self.lost(job)
        return jobs

    def rejected(self, group: RolloutGroup, reason: str) -> None:
        """Leave out a complete group that the algorithm does not train.

        Its prompt is not sampled again; another group opens.
        """
        self._taken.add(group.id)
        self.counts[f"groups_rejected_{reason}"] += 1

    def add_ready(self, group: RolloutGroup) -> bool:
        """Have a complete group wait for a batch.

        Returns:
            False if it is too old already, and was dropped.
        """
        if not self._take(group):
            return False
        self.ready.append(group)
        return True

    def add_unscored(self, group: RolloutGroup) -> bool:
        """Have a complete group wait for the teacher.

        Returns:
            False if it is too old already, and was dropped.
        """
        if not self._take(group):
            return False
        self.unscored[group.id] = group
        return True

    def scored(self, group: RolloutGroup) -> bool:
        """Have a group that the teacher was asked about wait for a batch.

        Returns:
            False if it was dropped meanwhile.
        """
        return self.unscored.pop(group.id, None) is not None and self.add_ready(group)

    def sweep(self, step: int) -> tuple[list[RolloutGroup], list[str]]:
        """Drop what is too old for `step`.

        Returns:
            The complete groups that were dropped, and the jobs to cancel.
        """
        oldest = self.limits.oldest_version(step)
        stale = [group for group in (*self.ready, *self.unscored.values()) if group.opened_version < oldest]
        self.ready = [group for group in self.ready if group.opened_version >= oldest]
        for group in stale:
            self.unscored.pop(group.id, None)
            self._count_stale(len(group.rollouts))
        cancelled = []
        for open_group in [g for g in self.open.values() if g.version < oldest]:
            cancelled += self._drop(open_group, "stale")
        return stale, cancelled

    def cut(self) -> list[RolloutGroup] | None:
        """Take the groups of the next step's batch, oldest first. Sweep before.

        A group fills as many places of a batch as its environment's groups have rollouts, however many it has kept.

        Returns:
            None if there are not enough.
        """
        self.ready.sort(key=lambda group: group.opened_version)  # stable: equal versions stay in order of completion
        sizes = [self.limits.group_sizes[group.environment] for group in self.ready]
        chosen = choose(sizes, self.limits.batch_size)
        if chosen is None:
            return None
        batch = [self.ready[index] for index in chosen]
        for index in reversed(chosen):
            del self.ready[index]
        self.step += 1
        return batch

    def uncut(self, groups: Sequence[RolloutGroup]) -> None:
        """Take back a batch that could not be given out."""
        self.step -= 1
        self.ready[:0] = groups

    def _rollouts(self, groups: Iterable[OpenGroup | RolloutGroup]) -> int:
        return sum(self.limits.group_sizes[group.environment] for group in groups)

    def _may_open(self, available: Collection[str]) -> list[str]:
        """Labels of the environments of which a group may open now."""
        ready = self._rollouts((*self.ready, *self.unscored.values()))
        pending = self._rollouts(self.open.values())
        labels = [label for label in self._cursors if label in available]
        return [name for name in labels if self.limits.may_open(name, self.step, self.version, ready, pending)]

    def _open(self, available: Collection[str]) -> OpenGroup | None:
        position = self._next_position(self._may_open(available))
        if position is None:
            return None
        label, example = position
        name = group_id(label, example)
        task = self._drawn.pop(name, None)
        if task is None:
            mine = [group.task for group in self.open.values() if group.environment == label]
            task = self._draws.draw(label, example, {other for other in mine if other is not None})
        members = list(range(self.limits.group_sizes[label]))
        group = OpenGroup(name, label, example, self.version, self._least_loaded(), members, task)
        self.open[group.id] = group
        self.counts["groups_opened"] += 1
        return group

    def _least_loaded(self) -> str:
        load = Counter(group.router for group in self.open.values())
        return min(self._routers, key=lambda name: load[name])

    def _next_position(self, available: Sequence[str]) -> tuple[str, int] | None:
        for position in self._unfinished:
            if position[0] in available:
                self._unfinished.remove(position)
                if group_id(*position) not in self._taken:
                    return position
                self._drawn.pop(group_id(*position), None)
                return self._next_position(available)
        if not available:
            return None
        # the environment that is furthest behind its share
        label = min(available, key=lambda name: (self._cursors[name] + 1) / self.limits.ratios[name])
        while group_id(label, self._cursors[label]) in self._taken:
            self._cursors[label] += 1
        self._cursors[label] += 1
        return label, self._cursors[label] - 1

    def _dispatch(self, group: OpenGroup) -> Job:
        index = group.to_dispatch.pop(0)
        job = f"{group.id}/{index}-{self.incarnation}{next(self._serial)}"
        self._jobs[job] = (group.id, index)
        self.counts["dispatched"] += 1
        salt = f"{self._salt}:{group.version}"
        return Job(job, group.id, group.environment, group.example, group.version, group.router, salt, group.task)

    def _end(self, job: str, how: str) -> tuple[OpenGroup, int]:
        group, index = self._jobs.pop(job)
        self.counts[how] += 1
        return self.open[group], index

    def _drop(self, group: OpenGroup, why: str) -> list[str]:
        jobs = [job for job, (owner, _) in self._jobs.items() if owner == group.id]
        for job in jobs:
            self._end(job, "cancelled")
        del self.open[group.id]
        self.counts[f"groups_dropped_{why}"] += 1
        if why == "stale":
            self.counts["rollouts_dropped_stale"] += len(jobs) + len(group.done)
        return jobs

    def _take(self, group: RolloutGroup) -> bool:
        if group.opened_version < self.limits.oldest_version(self.step):
            self._count_stale(len(group.rollouts))
            return False
        self._taken.add(group.id)
        return True

    def _count_stale(self, rollouts: int) -> None:
        self.counts["groups_dropped_stale"] += 1
        self.counts["rollouts_dropped_stale"] += rollouts


def group_id(label: str, example: int) -> str:
    """Return the id of a group: the same after a restart."""
    return f"{label}-{example:08d}"
