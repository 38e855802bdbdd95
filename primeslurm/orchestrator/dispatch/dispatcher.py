"""The dispatcher: which rollout runs next, on which replica, and under which policy version. A pure state machine.

- Capacity is counted in rollouts. A free slot is refilled at once, even if its group is incomplete.
- Rollouts prefer the replica of their group, whose KV cache holds the prompt.
- A group pins its policy version when it opens. `AgeLimit` decides when it is too old.
- A new group opens only if the trainer is expected to take it: at most two batches may wait for the trainer
  (`CompletionForecast`), and the batch in which the group is expected must not be too late for its version.

Every dispatched job ends in exactly one of the counters finished, failed, cancelled, lost, or is in flight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from primeslurm.orchestrator.dispatch.completion_forecast import CompletionForecast
from primeslurm.orchestrator.dispatch.continuations import Continuations
from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, OpenGroups, ReadyGroups, group_id
from primeslurm.orchestrator.dispatch.limits import DispatchLimits, ReplicaSlots, choose_groups
from primeslurm.orchestrator.rollouts.cache_salt import cache_salt, has_prefix
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Cause, Job
from primeslurm.wire.batches.rollout import Rollout

# Failures of one rollout, by cause, after which its group is given up. An unreachable engine is rarely the rollout's
# fault, and a prompt that is too long fails every time. Jobs that are lost with their worker do not count.
MAX_FAILURES: dict[Cause, int] = {"environment": 3, "engine": 10, "prompt": 1}
# Form the next batch early if that loses at most this fraction of a batch
MAX_EARLY_LOSS = 0.02
# A rollout waits for a slot on its group's replica until this many groups per replica were opened after it
AFFINITY_GROUPS = 2


class AgeLimitResult(NamedTuple):
    """Effects of the age limit on the groups."""

    stale: list[RolloutGroup]  # Complete groups that were dropped
    cancelled: list[str]  # Jobs to cancel
    early: list[RolloutGroup]  # Groups that completed with fewer rollouts, because no later batch may train them


class Dispatcher:
    """All groups and jobs that are not in a batch.

    Args:
        salt_prefix: Prefix of every cache salt (`cache_salt.attempt_prefix`).
        incarnation: Makes job ids unique over restarts of the orchestrator.
        examples: Streams of examples. None: those of a new run.
    """

    def __init__(
        self,
        limits: DispatchLimits,
        routers: Sequence[str],
        salt_prefix: str,
        incarnation: str,
        step: int = 1,
        *,
        examples: Examples | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.step = step
        self.version = -1
        self.counts: Counter[str] = Counter()
        self.incarnation = incarnation
        self.open = OpenGroups()
        # Complete groups that are not on disk yet, or whose filtering is not decided
        self.unsaved: dict[str, OpenGroup] = {}
        # Complete groups that wait for the teacher
        self.unscored: dict[str, RolloutGroup] = {}
        self.replicas = ReplicaSlots(routers)
        self._examples = examples or Examples(limits.ratios)
        self.age_limit = replace(limits.age_limit, was_returned=self._examples.was_returned)
        self.ready = ReadyGroups(self.age_limit.version_of)
        self._continuations = Continuations(limits, self.age_limit, self._examples, self.open, self.unsaved)
        self._salt_prefix = salt_prefix
        # Group of each job in flight
        self._jobs: dict[str, str] = {}
        # Finished jobs of groups that are not on disk
        self._unsaved_jobs: set[str] = set()
        # A job is adopted once. Otherwise a rollout that became too old would be adopted again after every restart.
        self._adopted: set[str] = set()
        self._forecast = CompletionForecast(limits.ratios, clock)
        self._surplus: list[str] = []
        self._serial = count()

    @property
    def inflight(self) -> int:
        return len(self._jobs)

    @property
    def queue_lengths(self) -> dict[str, int]:
        return {"ready_groups": len(self.ready), "open_groups": len(self.open), "inflight": self.inflight}

    @property
    def cursors(self) -> dict[str, int]:
        """Return the next position in each environment's stream."""
        return dict(self._examples.cursors)

    @property
    def unfinished(self) -> list[tuple[str, int]]:
        """Return the positions before the cursors whose groups are not finished."""
        # A continuation does not make its example unfinished: the group before it is trained.
        groups = [group for group in self._unfinished_groups() if not group.continuation]
        return [*((group.environment, group.example) for group in groups), *self._examples.unfinished]

    @property
    def drawn(self) -> dict[str, int]:
        """Return the tasks that curricula drew for unfinished groups, by group id."""
        drawn = {group.id: group.task for group in self._unfinished_groups() if group.task is not None}
        return drawn | self._examples.drawn

    @property
    def returned(self) -> list[tuple[str, int]]:
        """Return the returned examples that a restart must know. See `Examples.returned`."""
        groups = (*self._unfinished_groups(), *self.ready, *self.unscored.values())
        return self._examples.returned({(group.environment, group.example) for group in groups})

    # jobs

    def next_job(self, available: Collection[str]) -> Job | None:
        """Dispatch the next job of the environments that are available. None if no job may start now."""
        if self.version < 0 or self.inflight >= self.limits.max_inflight:
            return None
        if not (routers := self.replicas.with_free_slots):
            return None
        preferred = self.open.next(available, routers, AFFINITY_GROUPS * len(self.replicas.routers))
        group = preferred or self._open_next(available) or self.open.next(available)
        if group is None:
            return None
        index = self.open.take(group)
        job = f"{group.id}/{index}-{self.incarnation}{next(self._serial)}"
        router = self.replicas.assign(job, group.router)
        self._start(group, index, job)
        salt = cache_salt(self._salt_prefix, group.version)
        fields = (group.id, group.environment, group.example, group.version, router, salt, group.task)
        return Job(job, *fields, sender=self.incarnation)

    def runs(self, job: str) -> bool:
        return job in self._jobs

    def group_of(self, job: str) -> OpenGroup:
        return self.open[self._jobs[job]]

    def holds_result(self, job: str) -> bool:
        """Tell whether the result of a finished job is only in memory, and would be lost with this process."""
        return job in self._unsaved_jobs

    def finished(self, job: str, rollout: tuple[Rollout, ...]) -> RolloutGroup | None:
        """Add the rollout of a job, and return its group if that completed it.

        The example stays unfinished until `rejected`, `add_ready` or `add_unscored` is called with the group. Raise
        KeyError if the job is not in flight.
        """
        group, index = self._end(job, "finished", finished=True)
        group.done[index] = rollout
        group.finished_jobs.append(job)
        self._unsaved_jobs.add(job)
        if len(group.done) < group.size:
            return None
        if self.limits.staleness.surplus == "carry" and group.jobs:
            self._continue_elsewhere(group)
        self._surplus += self._close(group)
        return self._complete(group)

    def take_surplus_jobs(self) -> list[str]:
        """Return the jobs to cancel because their groups completed without them."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def failed(self, job: str, cause: Cause = "environment") -> list[str]:
        """Retry the rollout of a failed job, or give up its group. Returns the jobs to cancel."""
        group, index = self._end(job, "failed")
        failures = group.engine_failures if cause == "engine" else group.failures
        failures[index] += 1
        if failures[index] >= MAX_FAILURES[cause]:
            return self._drop(group, "failed")
        self.open.redispatch(group, index)
        return []

    def lost(self, job: str) -> None:
        group, index = self._end(job, "lost")
        self.open.redispatch(group, index)

    def give_up(self, label: str, example: int) -> list[str]:
        """Exclude an example that kills its workers from the run. Returns the jobs to cancel."""
        groups = [group for group in self.open.values() if (group.environment, group.example) == (label, example)]
        self._examples.taken.add(group_id(label, example))
        return [job for group in groups for job in self._drop(group, "failed")]

    def drop_router(self, router: str) -> list[str]:
        """Move a lost replica's open groups to the remaining replicas. Returns the jobs to cancel."""
        jobs = self.replicas.drop(router)
        for job in jobs:
            self.lost(job)
        for group in self.open.values():
            if group.router == router:
                group.router = self.replicas.least_loaded()
        return jobs

    # complete groups

    def rejected(self, group: RolloutGroup, reason: str) -> None:
        """Leave out a complete group. Its example is not sampled again; another group opens."""
        self._settle(group.id)
        self._examples.taken.add(group.id)
        self.counts[f"groups_rejected_{reason}"] += 1

    def add_ready(self, group: RolloutGroup) -> bool:
        """Queue a complete group for a batch. False if it is too old, and was dropped."""
        if not self._accept(group):
            return False
        self.ready.add(group)
        return True

    def add_unscored(self, group: RolloutGroup) -> bool:
        """Queue a complete group for the teacher. False if it is too old, and was dropped."""
        if not self._accept(group):
            return False
        self.unscored[group.id] = group
        return True

    def scored(self, group: RolloutGroup) -> bool:
        """Queue a group for a batch whose teacher log-probabilities have arrived. False if it was dropped meanwhile."""
        return self.unscored.pop(group.id, None) is not None and self.add_ready(group)

    def give_up_damaged(self, name: str) -> None:
        """Drop a complete group, in no batch yet, whose file is damaged. Its example is sampled again."""
        ready = [group for group in self.ready if group.id == name]
        tasks = [group.task for group in (*ready, *self.unscored.values()) if group.id == name]
        self.ready.remove(ready)
        self.unscored.pop(name, None)
        self.counts["groups_damaged"] += 1
        if (position := self._examples.position_of_file(name)) is not None:
            self._sample_again(group_id(*position), *position, next(iter(tasks), None))

    def exists(self, name: str) -> bool:
        """Tell whether a group that was given up was sampled again and is complete: its file is needed."""
        is_continuation = "." in name.rpartition("-")[2]  # continuations are never sampled again
        return name in self.unsaved or (name in self._examples.taken and not is_continuation)

    # the age limit

    def apply_age_limit(self, step: int) -> AgeLimitResult:
        """Give up, or complete early, the groups that are too old for `step`, by the rule of the recipe."""
        oldest = self.age_limit.oldest_version(step)
        stale = self.ready.before(oldest)
        self.ready.remove(stale)
        stale += [group for group in self.unscored.values() if self.age_limit.is_too_old(group, step)]
        for group in stale:
            self.unscored.pop(group.id, None)
            self._count_stale(group.size)
            self._sample_again(group.id, group.environment, group.example, group.task)
        if self.limits.staleness.rule == "mask":
            return AgeLimitResult(stale, [], [])
        cancelled: list[str] = []
        for old in self.open.before(oldest):
            if self._finishes_late(old):
                self.open.set_version(old, max(old.version, self.version))
            else:
                cancelled += self._drop(old, "stale")
                self._sample_again(old.id, old.environment, old.example, old.task)
        early, more = self._complete_early(oldest)
        return AgeLimitResult(stale, cancelled + more, early)

    def _complete_early(self, oldest: int) -> tuple[list[RolloutGroup], list[str]]:
        """Complete the groups at their last chance if that fills a batch. Returns them, and the jobs to cancel."""
        if self.ready.rollouts + self.open.at(oldest) < self.limits.batch_size:
            return [], []
        last = [group for group in self.open.values() if group.version == oldest and self._may_complete_early(group)]
        if self.ready.rollouts + _done(last) < self.limits.batch_size:
            return [], []
        completed: list[RolloutGroup] = []
        cancelled: list[str] = []
        for group in last:
            if group.jobs and self._finishes_late(group):
                self._continue_elsewhere(group)
            cancelled += self._close(group)
            completed.append(self._complete(group))  # at once, so that the next continuation gets another id
            self.counts["groups_completed_early"] += 1
        return completed, cancelled

    def _may_complete_early(self, group: OpenGroup) -> bool:
        rule = self.limits.staleness
        return len(group.done) >= rule.min_rollouts and (rule.rule != "drop" or self._finishes_late(group))

    def _finishes_late(self, group: OpenGroup) -> bool:
        return self.age_limit.finishes_late(group.environment, group.example, group.id)

    def _continue_elsewhere(self, group: OpenGroup) -> None:
        """Move the running rollouts of a group to another group of the same example."""
        self.counts["rollouts_carried"] += len(group.jobs)
        successor = self._continuations.successor(group, self.step, self.version)
        self._add_open(successor)
        self._jobs |= dict.fromkeys(successor.jobs, successor.id)

    # batches

    def may_form_early(self) -> bool:
        """Tell whether the next step's batch may be formed before the trainer needs it."""
        if self.ready.rollouts < self.limits.batch_size:
            return False
        oldest = self.age_limit.oldest_version(self.step)
        last_unscored = any(self.age_limit.is_last_chance(group, self.step) for group in self.unscored.values())
        if last_unscored or self._has_unsaved(oldest):
            return False
        # Groups that no later batch may train would lose the rollouts that finish until the trainer needs the batch.
        rule = self.limits.staleness.rule
        last = [] if rule == "mask" else self.open.before(oldest + 1)
        loss = self._forecast.loss_if_formed_early(last, partial=rule != "drop")
        return loss is not None and loss <= MAX_EARLY_LOSS * self.limits.batch_size

    def next_batch(self) -> list[RolloutGroup]:
        """Return the groups that `take_batch` would take; empty if there are not enough."""
        if self.ready.rollouts < self.limits.batch_size:
            return []
        self.ready.sort()
        # Groups at their last chance come first: prefer an oversized batch to dropping a group.
        last = [group for group in self.ready if self.age_limit.is_last_chance(group, self.step)]
        missing = self.limits.batch_size - sum(group.size for group in last)
        if missing <= 0:
            return _choose(last, self.limits.batch_size)
        others = [group for group in self.ready if not self.age_limit.is_last_chance(group, self.step)]
        return last + _choose(others, missing)

    def take_batch(self, early: bool = False) -> list[RolloutGroup] | None:
        """Take the groups of the next step's batch, oldest first. Call `apply_age_limit` before.

        `early`: the trainer still trains the step before. Returns None if there are too few groups, or if one at its
        last chance is still being written to disk.
        """
        batch = self.next_batch()
        if not batch or self._has_unsaved(self.age_limit.oldest_version(self.step)):
            return None
        self.ready.remove(batch)
        self._examples.put_in_batch({group.id for group in batch})
        self.step += 1
        self._forecast.batch_formed(early)
        return batch

    def return_batch(self, groups: Sequence[RolloutGroup]) -> None:
        """Undo `take_batch`, because the batch could not be recorded."""
        self.step -= 1
        self._forecast.batch_returned()
        self._examples.forget_batch({group.id for group in groups})
        self.ready.put_back(groups)

    def step_done(self) -> None:
        self._forecast.step_done()

    def committed(self, names: Collection[str]) -> None:
        self._examples.forget_batch(names)

    def _has_unsaved(self, version: int) -> bool:
        if self.limits.staleness.counts_tokens:
            return False
        return any(group.version == version for group in self.unsaved.values())

    # jobs of an earlier orchestrator

    def adopt_job(self, job: Job, *, runs: bool) -> bool:
        """Continue a job of an earlier orchestrator of this attempt, if it is needed. `runs`: it has not ended."""
        if job.id in self._adopted or job.sender in ("", self.incarnation):
            return False
        if not has_prefix(job.cache_salt, self._salt_prefix):  # of another attempt
            return False
        if job.environment not in self.limits.ratios or job.router not in self.replicas.load:
            return False
        group = self._continuations.group_for(job, self.step, runs=runs)
        if group is not None and group.id not in self.open:
            self._add_open(group)
        if group is None or not group.to_dispatch:
            return False
        self.counts["claimed"] += 1
        self._adopted.add(job.id)
        self.replicas.add(job.id, job.router)
        self._start(group, self.open.take(group), job.id)
        return True

    # groups

    def _may_open(self, available: Collection[str]) -> list[str]:
        """Return the labels of the environments that may open a group now."""
        waiting = sum(group.size for group in self.unscored.values()) + _done(self.unsaved.values())
        ready = self.ready.rollouts + waiting
        # Groups that are too old already do not compete for a batch: they are taken whenever they complete.
        pending = self.open.pending(self.age_limit.oldest_version(self.step))
        landing = self._forecast.landing(self.open)
        if self._forecast.early_batches:  # it also waits for the trainer
            landing += self.limits.batch_size * self.limits.oversampling
        state = (self.step, self.version, ready, pending, landing)
        return [name for name in self._examples.cursors if name in available and self.limits.may_open(name, *state)]

    def _open_next(self, available: Collection[str]) -> OpenGroup | None:
        position = self._examples.take_next(self._may_open(available))
        if position is None:
            return None
        running = (group.task for group in self._unfinished_groups() if group.environment == position[0])
        task = self._examples.take_task(position, running)
        group = self.limits.new_group(*position, self.version, self.replicas.least_loaded(), task)
        self._add_open(group)
        return group

    def _add_open(self, group: OpenGroup) -> None:
        self.open.add(group)
        self._forecast.opened(group)
        if not group.continuation:
            self.counts["groups_opened"] += 1

    def _start(self, group: OpenGroup, index: int, job: str) -> None:
        self._jobs[job], group.jobs[job] = group.id, index
        self._forecast.started(group, job)
        self.counts["dispatched"] += 1

    def _end(self, job: str, how: str, *, finished: bool = False) -> tuple[OpenGroup, int]:
        group = self.open[self._jobs.pop(job)]
        self.replicas.release(job)
        self._forecast.ended(group, job, finished=finished)
        self.counts[how] += 1
        return group, group.jobs.pop(job)

    def _close(self, group: OpenGroup) -> list[str]:
        """Close a group, and return its running jobs, which are to be cancelled."""
        jobs = list(group.jobs)
        for job in jobs:
            self._end(job, "cancelled")
        self.open.remove(group)
        self._forecast.closed(group)
        return jobs

    def _drop(self, group: OpenGroup, reason: str) -> list[str]:
        jobs = self._close(group)
        self._unsaved_jobs.difference_update(group.finished_jobs)
        self.counts[f"groups_dropped_{reason}"] += 1
        if reason == "stale":
            self.counts["rollouts_dropped_stale"] += len(jobs) + len(group.done)
        return jobs

    def _complete(self, group: OpenGroup) -> RolloutGroup:
        self.unsaved[group.id] = group
        return group.complete()

    def _settle(self, name: str) -> None:
        """Forget the jobs of a complete group that is on disk, or not needed: a restart does not ask for them."""
        if (group := self.unsaved.pop(name, None)) is not None:
            self._unsaved_jobs.difference_update(group.finished_jobs)

    def _accept(self, group: RolloutGroup) -> bool:
        """Settle a complete group. False if it is too old."""
        self._settle(group.id)
        position = (group.environment, group.example)
        is_stale = self.age_limit.is_too_old(group, self.step)
        # A restart may find the file of a stale group after its example was recorded as unfinished.
        is_recorded = is_stale and position in self._examples.unfinished
        if group.id == group_id(*position) and not is_recorded:
            self._examples.mark_opened(position)
        if is_stale:
            self._count_stale(group.size)
            self._sample_again(group.id, group.environment, group.example, group.task)
            return False
        self._examples.taken.add(group.id)
        return True

    def _sample_again(self, name: str, label: str, example: int, task: int | None) -> None:
        if name != group_id(label, example):
            return  # a continuation: the first group of the example is trained
        if self._examples.sample_again((label, example), task):
            self.counts["examples_returned"] += 1

    def _unfinished_groups(self) -> list[OpenGroup]:
        return [*self.open.values(), *self.unsaved.values()]

    def _count_stale(self, rollouts: int) -> None:
        self.counts["groups_dropped_stale"] += 1
        self.counts["rollouts_dropped_stale"] += rollouts


def _done(groups: Iterable[OpenGroup]) -> int:
    return sum(len(group.done) for group in groups)


def _choose(groups: Sequence[RolloutGroup], rollouts: int) -> list[RolloutGroup]:
    return [groups[index] for index in choose_groups([group.size for group in groups], rollouts)]
