"""Continuations: other groups for running rollouts that their own group cannot take.

A group may complete without some of its rollouts, because it is at its last chance or has surplus rollouts. And an
orchestrator may be killed while its workers run jobs. Such rollouts continue in the open group of their example, or in
a continuation group, whose id is that of the example's first group and a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, OpenGroups, group_id
from primeslurm.orchestrator.dispatch.limits import DispatchLimits
from primeslurm.orchestrator.dispatch.staleness import AgeLimit
from primeslurm.orchestrator.rollouts.job_protocol import Job

# Upper bound on the continuation groups of one example per step. It keeps their ids unique over restarts.
CONTINUATIONS_PER_STEP = 1000


class Continuations:
    """Finds or makes groups for rollouts. `unsaved` are complete groups that are not on disk."""

    def __init__(
        self,
        limits: DispatchLimits,
        age_limit: AgeLimit,
        examples: Examples,
        open_groups: OpenGroups,
        unsaved: Mapping[str, OpenGroup],
    ) -> None:
        self._limits, self._age_limit, self._examples = limits, age_limit, examples
        self._open, self._unsaved = open_groups, unsaved

    def successor(self, group: OpenGroup, step: int, version: int) -> OpenGroup:
        """Move the running rollouts of a group to a new group, which is to be opened at `version`."""
        names = self._names(group.environment, group.example, step)
        number = next(number for number, name in names if name not in self._open and self._is_new(name))
        min_size = min(self._limits.staleness.min_rollouts, self._limits.group_sizes[group.environment])
        return group.continue_as(number, version, min_size)

    def group_for(self, job: Job, step: int, *, runs: bool) -> OpenGroup | None:
        """Return the group in which a job of an earlier orchestrator continues, which may have to be opened.

        None: the job is too old, or its group is complete or was opened again.
        """
        position = (job.environment, job.example)
        finishes_late = self._age_limit.finishes_late(*position, job.group)
        group_ages = not self._limits.staleness.counts_tokens and not finishes_late
        if group_ages and job.opened_version < self._age_limit.oldest_version(step):
            return None
        first = group_id(*position)
        if job.group != first and not (runs and job.group.startswith(f"{first}.")):
            return None
        group = self._open.get(first)
        if group is None and first not in self._unsaved and self._examples.is_unopened(position):
            self._examples.mark_opened(position)
            self._examples.drawn.pop(first, None)
            return self._limits.new_group(*position, job.opened_version, job.router, job.task)
        if group is None:  # the example is trained without this rollout
            carries = finishes_late or self._limits.staleness.surplus == "carry"
            return self._continuation_for(job, step) if runs and carries else None
        if group_ages and group.version != job.opened_version:
            return None  # the example was opened again under another version
        self._open.set_version(group, max(group.version, job.opened_version))
        return group

    def _continuation_for(self, job: Job, step: int) -> OpenGroup:
        label, example, version = job.environment, job.example, job.opened_version
        max_size = self._limits.group_sizes[label]

        def has_room(name: str) -> bool:
            if (group := self._open.get(name)) is None:
                return self._is_new(name)
            return bool(group.to_dispatch) or group.size < max_size

        number, name = next((number, name) for number, name in self._names(label, example, step) if has_room(name))
        group = self._open.get(name)
        if group is None:
            size = min(self._limits.staleness.min_rollouts, max_size)  # it grows with each adopted job
            return OpenGroup(name, label, example, version, job.router, size, list(range(size)), job.task, number)
        if not group.to_dispatch:
            self._open.grow(group)
        newest = self._limits.staleness.counts_tokens
        self._open.set_version(group, max(group.version, version) if newest else min(group.version, version))
        return group

    def _names(self, label: str, example: int, step: int) -> Iterator[tuple[int, str]]:
        # Steps only grow, also over restarts, so no continuation gets the id of one that was trained and forgotten.
        numbers = count(CONTINUATIONS_PER_STEP * step + 1)
        return ((number, group_id(label, example, number)) for number in numbers)

    def _is_new(self, name: str) -> bool:
        return name not in self._unsaved and name not in self._examples.taken
