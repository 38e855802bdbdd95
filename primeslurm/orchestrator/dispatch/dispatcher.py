"""Which rollout runs next, under which policy version, and which are too old: a pure state machine.

Places are rollouts: when one ends, the next begins, whatever the group that it is of waits for. A rollout stays with
the replica that it began at: the one of the group's others, whose cache has their prompt, if there is room, else the
one with the most room. A group pins its policy version when it opens. Its staleness counts from there: step s takes
only groups opened at versions >= s-1-max_off_policy_steps. Two bounds keep groups from being opened: what waits for the
trainer, or will after its next step (`work_ahead`); and what would become too old: a new group is expected in the batch
that the groups before it leave room in. What gets too old nevertheless ends as `DispatchLimits.staleness` says.

Every dispatched job ends in exactly one of the counters finished, failed, cancelled, lost, or is in flight.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from primeslurm.orchestrator.dispatch.completion_forecast import CompletionForecast
from primeslurm.orchestrator.dispatch.examples import Examples
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup, OpenGroups, group_id
from primeslurm.orchestrator.dispatch.limits import DispatchLimits, choose
from primeslurm.orchestrator.dispatch.ready_groups import ReadyGroups
from primeslurm.orchestrator.dispatch.replica_slots import ReplicaSlots
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.job_protocol import Cause, Job
from primeslurm.wire.batches.rollout import Rollout

PARTS_A_STEP = 1000
"""Groups of an example that rollouts are carried into: fewer than so many are opened while a step's batch forms."""
CUT_AHEAD_LOSS = 0.02
"""A batch is cut ahead of its time if so much of one is lost by that: the trainer does not wait for its fetch then."""
MAX_FAILURES: dict[Cause, int] = {"environment": 3, "engine": 10, "prompt": 1}
"""Failures of one rollout, by cause, after which its group is given up. If no engine answers, that is no fault of the
rollout, unless its request is to blame. Lost jobs (their worker died) do not count."""


class AgeLimitResult(NamedTuple):
    """What a sweep has found."""

    stale: list[RolloutGroup]
    """Complete groups that were dropped."""
    cancelled: list[str]
    """Jobs to cancel."""
    early: list[RolloutGroup]
    """Groups that are complete with fewer rollouts than others, as this batch is their last chance."""


PATIENCE = 2
"""A group's next rollout waits for room on its replica, which has its prompt, until so many groups were opened after it
for each replica."""


class Dispatcher:
    """See the module docstring.

    Args:
        salt: prefix of every cache salt, `<run id>.<attempt>`.
        incarnation: makes job ids unique over restarts of the orchestrator.
        step: whose batch is formed next.
        examples: that groups are of; of a new run without them.
        clock: tells the time [s].
    """

    def __init__(
        self,
        limits: DispatchLimits,
        routers: Sequence[str],
        salt: str,
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
        self.ready = ReadyGroups(self._age_of)
        self.open = OpenGroups()
        self.unscored: dict[str, RolloutGroup] = {}
        """Complete groups that wait for the teacher."""
        self._finishing: dict[str, OpenGroup] = {}
        """Complete groups of which it is not known yet whether they are trained, or which are not on disk yet."""
        self._salt = salt
        self.incarnation = incarnation
        self._examples = examples or Examples(limits.ratios)
        self._jobs: dict[str, str] = {}
        """Group by job."""
        self._kept: set[str] = set()
        """Jobs that are finished, in groups that are not on disk."""
        self._claimed: set[str] = set()
        """Jobs of others, each of which is gone on with once: what became too old would come back for ever."""
        self._replicas = ReplicaSlots(routers)
        self._ahead = CompletionForecast(limits.ratios, clock)
        self._surplus: list[str] = []
        self._serial = count()

    @property
    def inflight(self) -> int:
        """Return how many jobs were dispatched and have not ended."""
        return len(self._jobs)

    @property
    def cursors(self) -> dict[str, int]:
        """Return the next position in each environment's task stream."""
        return dict(self._examples.cursors)

    @property
    def unfinished(self) -> list[tuple[str, int]]:
        """Return the positions before the cursors whose groups are not finished."""
        first = [
            group for group in self._unfinished_groups() if not group.part
        ]  # of an example with a later one, one is done
        return [*((group.environment, group.example) for group in first), *self._examples.unfinished]

    @property
    def drawn(self) -> dict[str, int]:
        """Return the tasks that were drawn for unfinished groups, by group id."""
        drawn = {group.id: group.task for group in self._unfinished_groups() if group.task is not None}
        return drawn | self._examples.drawn

    @property
    def returned(self) -> list[tuple[str, int]]:
        """Return the examples that were given up once and are in no committed step, or with a part of them alone."""
        groups = (*self._unfinished_groups(), *self.ready, *self.unscored.values())
        return self._examples.returned({(group.environment, group.example) for group in groups})

    @property
    def ready_rollouts(self) -> int:
        """Return how many rollouts the groups that wait for a batch have."""
        return self.ready.rollouts

    def runs(self, job: str) -> bool:
        """Tell whether a job is in flight."""
        return job in self._jobs

    def group_of(self, job: str) -> OpenGroup:
        """Return the group of a job in flight."""
        return self.open[self._jobs[job]]

    def next_job(self, available: Collection[str]) -> Job | None:
        """Dispatch the next job.

        Args:
            available: labels of the environments that have a worker.

        Returns:
            None if nothing may start now.
        """
        if self.version < 0 or self.inflight >= self.limits.max_inflight:
            return None
        if not (routers := self._replicas.with_free_slots):
            return None
        at_home = self.open.next(available, routers, PATIENCE * len(self._replicas.routers))
        group = at_home or self._open(available) or self.open.next(available)
        return self._dispatch(group) if group else None

    def holds(self, name: str) -> bool:
        """Tell whether a group that was given up has come again, and is complete. No part comes again."""
        is_part = "." in name.rpartition("-")[2]
        return name in self._finishing or (name in self._examples.taken and not is_part)

    def keeps(self, job: str) -> bool:
        """Tell whether what a finished job made is in memory only."""
        return job in self._kept

    def claim(self, job: Job, *, runs: bool) -> bool:
        """Go on with a job that another orchestrator of this attempt has dispatched.

        Args:
            job: that a worker has.
            runs: it has not ended. What has may be in a group that was completed.

        Returns:
            False if nobody wants it: it is too old, its group is complete or begun anew, or its replica is gone.
        """
        if job.id in self._claimed or job.sender in ("", self.incarnation):
            return False
        if not job.cache_salt.startswith(f"{self._salt}:"):  # of another attempt
            return False
        if job.environment not in self.limits.ratios or job.router not in self._replicas.load:
            return False
        group = self._group_to_claim(job, runs)
        if group is None or not group.to_dispatch:
            return False
        self.counts["claimed"] += 1
        self._claimed.add(job.id)
        self._replicas.adopt(job.id, job.router)
        self._start(group, self.open.take(group), job.id)
        return True

    @property
    def routers(self) -> tuple[str, ...]:
        """Return the routers of the replicas that rollouts are spread over."""
        return tuple(self._replicas.routers)

    @property
    def replicas(self) -> ReplicaSlots:
        """Return what each replica runs, and may run."""
        return self._replicas

    def finished(self, job: str, rollout: tuple[Rollout, ...]) -> RolloutGroup | None:
        """Take the rollout that a job made.

        Returns:
            Its group, if that completed it. Its example is unfinished until `rejected`, `add_ready` or `add_unscored`
            is told of it.

        Raises:
            KeyError: the job is not in flight.
        """
        group, index = self._end(job, "finished", whole=True)
        group.done[index] = rollout
        group.finished.append(job)
        self._kept.add(job)
        if len(group.done) < group.size:
            return None
        if self.limits.staleness.surplus == "carry" and group.jobs:
            self._carry(group)
        self._surplus += self._close(group)
        return self._complete(group)

    def take_surplus_jobs(self) -> list[str]:
        """Return jobs of groups that were completed without them: they are to be cancelled."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def step_done(self) -> None:
        """Note that the trainer is done with the batch that was cut last."""
        self._ahead.step_done()

    def failed(self, job: str, cause: Cause = "environment") -> list[str]:
        """Try the rollout of a failed job again, or give up its group.

        Args:
            job: that failed.
            cause: whose fault that was. A task whose own prompt is too long is not tried again.

        Returns:
            The jobs to cancel, if the group was given up.
        """
        group, index = self._end(job, "failed")
        tries = group.engine_failures if cause == "engine" else group.tries
        tries[index] += 1
        if tries[index] >= MAX_FAILURES[cause]:
            return self._drop(group, "failed")
        self.open.again(group, index)
        return []

    def give_up(self, label: str, example: int) -> list[str]:
        """Give up an example that kills the workers that run it, for good.

        Returns:
            The jobs to cancel.
        """
        groups = [group for group in self.open.values() if (group.environment, group.example) == (label, example)]
        self._examples.taken.add(group_id(label, example))
        return [job for group in groups for job in self._drop(group, "failed")]

    def lost(self, job: str) -> None:
        """Dispatch a job again, as what ran it is gone."""
        group, index = self._end(job, "lost")
        self.open.again(group, index)

    def drop_router(self, router: str) -> list[str]:
        """Have the open groups of a replica that is gone go on with the others.

        Returns:
            The jobs to cancel; they are dispatched again.
        """
        jobs = self._replicas.drop(router)
        for job in jobs:
            self.lost(job)
        for group in self.open.values():
            if group.router == router:
                group.router = self._replicas.least_loaded()
        return jobs

    def rejected(self, group: RolloutGroup, reason: str) -> None:
        """Leave out a complete group that the algorithm does not train.

        Its prompt is not sampled again; another group opens.
        """
        self._settle(group.id)
        self._examples.taken.add(group.id)
        self.counts[f"groups_rejected_{reason}"] += 1

    def add_ready(self, group: RolloutGroup) -> bool:
        """Have a complete group wait for a batch.

        Returns:
            False if it is too old already, and was dropped.
        """
        if not self._take(group):
            return False
        self.ready.add(group)
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

    def apply_age_limit(self, step: int) -> AgeLimitResult:
        """Give up what is too old for `step`, as the rule says."""
        oldest = self.limits.oldest_version(step)
        late = self.ready.before(oldest)
        self.ready.take(late)
        stale = late + [group for group in self.unscored.values() if self._age_of(group) < oldest]
        for group in stale:
            self.unscored.pop(group.id, None)
            self._count_stale(group.size)
            self._come_again(group.id, group.environment, group.example, group.task)
        if self.limits.staleness.rule == "mask":
            return AgeLimitResult(stale, [], [])
        cancelled: list[str] = []
        for old in self.open.before(oldest):
            if self._goes_on(old.environment, old.example, old.id):
                self.open.reopen_at(old, max(old.version, self.version))
            else:
                cancelled += self._drop(old, "stale")
                self._come_again(old.id, old.environment, old.example, old.task)
        early, more = self._last_chance(oldest)
        return AgeLimitResult(stale, cancelled + more, early)

    def may_form_early(self) -> bool:
        """Tell whether the next step's batch may be cut before the trainer needs it.

        Not if much of the groups that may be in no later one is expected to be done until then.
        """
        if self.ready_rollouts < self.limits.batch_size:
            return False
        oldest = self.limits.oldest_version(self.step)
        if self._finishes(oldest) or any(self._age_of(group) <= oldest for group in self.unscored.values()):
            return False
        rule = self.limits.staleness.rule
        last = [] if rule == "mask" else self.open.before(oldest + 1)  # mask finishes all of them
        lost = self._ahead.lost_by_cutting(last, members=rule != "drop")
        return lost is not None and lost <= CUT_AHEAD_LOSS * self.limits.batch_size

    def cut(self, ahead: bool = False) -> list[RolloutGroup] | None:
        """Take the groups of the next step's batch, oldest first. Sweep before.

        Args:
            ahead: the trainer is still at the step before.

        Returns:
            None if there are not enough, or if one that may be in no later batch is on its way to disk.
        """
        batch = self._chosen()
        if not batch or self._finishes(self.limits.oldest_version(self.step)):
            return None
        self.ready.take(batch)
        self._examples.put_in_batch({group.id for group in batch})
        self.step += 1
        self._ahead.batch_given(ahead)
        return batch

    def next_batch(self) -> list[RolloutGroup]:
        """Return the groups that `cut` would take, without taking them; none if there are not enough."""
        return self._chosen()

    def replace_with_loaded(self, group: RolloutGroup, whole: RolloutGroup) -> None:
        """Have a group that waits for a batch replaced by the same one with its arrays in memory."""
        self.ready.replace(group, whole)

    def unreadable(self, name: str) -> None:
        """Give up a complete group whose file is damaged; its example comes again.

        Args:
            name: its id, of a group that is in no batch.
        """
        damaged = [group for group in self.ready if group.id == name]
        known = [*damaged, *self.unscored.values()]
        self.ready.take(damaged)
        self.unscored.pop(name, None)
        self.counts["groups_damaged"] += 1
        task = next((group.task for group in known if group.id == name), None)
        if (position := self._examples.position_of_file(name)) is not None:
            self._come_again(group_id(*position), *position, task)

    def return_batch(self, groups: Sequence[RolloutGroup]) -> None:
        """Take back a batch that could not be given out."""
        self.step -= 1
        self._ahead.batch_taken_back()
        self._examples.forget_batch({group.id for group in groups})
        self.ready.put_back(groups)

    def committed(self, names: Collection[str]) -> None:
        """Note which groups are of committed steps, by id: they never wait for a batch again."""
        self._examples.forget_batch(names)

    def _chosen(self) -> list[RolloutGroup]:
        """The ready groups that make the next batch, if there are enough.

        First those that may be in no later one: it had better be larger than one of them be lost. Then the oldest.
        """
        if self.ready_rollouts < self.limits.batch_size:
            return []
        self.ready.sort()
        oldest = self.limits.oldest_version(self.step)
        last = [group for group in self.ready if self._age_of(group) <= oldest]
        lack = self.limits.batch_size - sum(group.size for group in last)
        if lack <= 0:
            return _choose(last, self.limits.batch_size)
        return last + _choose([group for group in self.ready if self._age_of(group) > oldest], lack)

    def _finishes(self, version: int) -> bool:
        """Whether a complete group that was opened at a version, and counts as of it, is not on disk yet."""
        if self.limits.staleness.counts_tokens:
            return False
        return any(group.version == version for group in self._finishing.values())

    def _last_chance(self, oldest: int) -> tuple[list[RolloutGroup], list[str]]:
        """Complete the groups that this batch is the last for, if that makes a batch.

        Returns:
            The groups, and the jobs to cancel.
        """
        if self.ready_rollouts + self.open.at(oldest) < self.limits.batch_size:
            return [], []
        last = [group for group in self.open.values() if group.version == oldest and self._may_end_early(group)]
        if self.ready_rollouts + _done(last) < self.limits.batch_size:
            return [], []
        completed: list[RolloutGroup] = []
        cancelled: list[str] = []
        for group in last:
            if group.jobs and self._goes_on(group.environment, group.example, group.id):
                self._carry(group)
            cancelled += self._close(group)
            completed.append(self._complete(group))  # at once: the next one's rollouts may not go on under its name
            self.counts["groups_completed_early"] += 1
        return completed, cancelled

    def _goes_on(self, label: str, example: int, name: str) -> bool:
        """Whether what runs of a group goes on when it gets too old, as with `carry`.

        Also where nothing of it would come again: its example came again already, or it is a part of one.
        """
        is_part = name != group_id(label, example)
        return self.limits.staleness.rule == "carry" or is_part or self._examples.was_returned((label, example))

    def _may_end_early(self, group: OpenGroup) -> bool:
        """Whether a group is trained with the rollouts that are done, if the next batch is its last."""
        rule = self.limits.staleness
        goes_on = self._goes_on(group.environment, group.example, group.id)
        return len(group.done) >= rule.at_least and (rule.rule != "drop" or goes_on)

    def _carry(self, group: OpenGroup) -> None:
        """Have the rollouts of a group that run go on in another one."""
        self.counts["rollouts_carried"] += len(group.jobs)
        known = (self.open, self._finishing, self._examples.taken)
        names = ((n, group_id(group.environment, group.example, n)) for n in count(self._first_part()))
        part = next(n for n, name in names if not any(name in those for those in known))
        least = min(self.limits.staleness.at_least, self.limits.group_sizes[group.environment])
        successor = group.successor(part, self.version, least)
        self.open.add(successor)
        self._ahead.opened(successor)
        self._jobs |= dict.fromkeys(successor.jobs, successor.id)

    def _group_to_claim(self, job: Job, runs: bool) -> OpenGroup | None:
        """The open group that a job of another orchestrator goes on in, opened if it is not."""
        goes_on = self._goes_on(job.environment, job.example, job.group)
        ages = not self.limits.staleness.counts_tokens and not goes_on
        if ages and job.opened_version < self.limits.oldest_version(self.step):
            return None
        first = group_id(job.environment, job.example)
        if job.group != first and not (runs and job.group.startswith(f"{first}.")):
            return None
        group = self.open.get(first)
        if (
            group is None
            and first not in self._finishing
            and self._examples.is_unopened((job.environment, job.example))
        ):
            return self._reopen(job)
        if group is None:  # its example is trained without it
            carries = goes_on or self.limits.staleness.surplus == "carry"
            return self._part_to_claim(job) if runs and carries else None
        if ages and group.version != job.opened_version:
            return None  # it was opened anew, under another version
        self.open.reopen_at(group, max(group.version, job.opened_version))
        return group

    def _part_to_claim(self, job: Job) -> OpenGroup:
        """A group that a rollout goes on in which was carried on from one that is complete, or would be."""
        label, example, version = job.environment, job.example, job.opened_version
        most = self.limits.group_sizes[label]

        def has_place(name: str) -> bool:
            if (group := self.open.get(name)) is None:
                return name not in self._examples.taken and name not in self._finishing
            return bool(group.to_dispatch) or group.size < most

        parts = count(self._first_part())
        part, name = next((n, name) for n in parts if has_place(name := group_id(label, example, n)))
        group = self.open.get(name)
        if group is None:
            size = min(self.limits.staleness.at_least, most)  # it grows as more are claimed
            group = OpenGroup(name, label, example, version, job.router, size, list(range(size)), job.task, part)
            self.open.add(group)
            self._ahead.opened(group)
        elif not group.to_dispatch:
            self.open.grow(group)
        newest = self.limits.staleness.counts_tokens
        self.open.reopen_at(group, max(group.version, version) if newest else min(group.version, version))
        return group

    def _first_part(self) -> int:
        """The least number of a new part. Steps grow over restarts, too: none has the name of one that was trained."""
        return PARTS_A_STEP * self.step + 1

    def _reopen(self, job: Job) -> OpenGroup:
        self._examples.mark_opened((job.environment, job.example))
        self._examples.drawn.pop(group_id(job.environment, job.example), None)
        return self._new_group(job.environment, job.example, job.opened_version, job.router, job.task)

    def _settle(self, name: str) -> None:
        """Keep nothing more of a complete group in view of a restart: it is on disk, or not wanted."""
        if (group := self._finishing.pop(name, None)) is not None:
            self._kept.difference_update(group.finished)

    def _unfinished_groups(self) -> list[OpenGroup]:
        return [*self.open.values(), *self._finishing.values()]

    def _complete(self, group: OpenGroup) -> RolloutGroup:
        self._finishing[group.id] = group
        return group.complete()

    def _close(self, group: OpenGroup) -> list[str]:
        """Take a group out of the open ones. Returns its jobs that still run: they are cancelled."""
        jobs = list(group.jobs)
        for job in jobs:
            self._end(job, "cancelled")
        self.open.remove(group)
        self._ahead.closed(group)
        return jobs

    def _come_again(self, name: str, label: str, example: int, task: int | None) -> None:
        """Have an example sampled again whose group was given up."""
        if name != group_id(label, example):
            return  # another group of the same example is trained
        if self._examples.come_again((label, example), task):
            self.counts["examples_returned"] += 1

    def _age_of(self, group: RolloutGroup) -> int:
        """The version that a group's staleness counts from."""
        goes_on = self._goes_on(group.environment, group.example, group.id)
        return group.newest_version if self.limits.staleness.counts_tokens or goes_on else group.opened_version

    def _may_open(self, available: Collection[str]) -> list[str]:
        """Labels of the environments of which a group may open now."""
        waiting = sum(group.size for group in self.unscored.values()) + _done(self._finishing.values())
        ready = self.ready.rollouts + waiting
        oldest = self.limits.oldest_version(self.step)  # older ones are taken whenever they are complete
        pending = self.open.pending(oldest)
        landing = self._ahead.landing(self.open)
        if self._ahead.given_ahead:  # it waits for the trainer, too, though it is none of those that may get too old
            landing += self.limits.batch_size * self.limits.oversampling
        now = (self.step, self.version, ready, pending, landing)
        return [name for name in self._examples.cursors if name in available and self.limits.may_open(name, *now)]

    def _open(self, available: Collection[str]) -> OpenGroup | None:
        position = self._examples.take_next(self._may_open(available))
        if position is None:
            return None
        running = (group.task for group in self._unfinished_groups() if group.environment == position[0])
        task = self._examples.take_task(position, running)
        return self._new_group(*position, self.version, self._replicas.least_loaded(), task)

    def _new_group(self, label: str, example: int, version: int, router: str, task: int | None) -> OpenGroup:
        size = self.limits.group_sizes[label]
        members = list(range(size + self.limits.staleness.extra_rollouts))
        group = OpenGroup(group_id(label, example), label, example, version, router, size, members, task)
        self.open.add(group)
        self._ahead.opened(group)
        self.counts["groups_opened"] += 1
        return group

    def _dispatch(self, group: OpenGroup) -> Job:
        index = self.open.take(group)
        job = f"{group.id}/{index}-{self.incarnation}{next(self._serial)}"
        router = self._replicas.begin(job, group.router)
        self._start(group, index, job)
        salt = f"{self._salt}:{group.version}"
        what = (group.id, group.environment, group.example, group.version, router, salt, group.task)
        return Job(job, *what, sender=self.incarnation)

    def _start(self, group: OpenGroup, index: int, job: str) -> None:
        self._jobs[job], group.jobs[job] = group.id, index
        self._ahead.started(group, job)
        self.counts["dispatched"] += 1

    def _end(self, job: str, how: str, *, whole: bool = False) -> tuple[OpenGroup, int]:
        group = self.open[self._jobs.pop(job)]
        self._replicas.end(job)
        self._ahead.ended(group, job, whole=whole)
        self.counts[how] += 1
        return group, group.jobs.pop(job)

    def _drop(self, group: OpenGroup, why: str) -> list[str]:
        jobs = self._close(group)
        self._kept.difference_update(group.finished)
        self.counts[f"groups_dropped_{why}"] += 1
        if why == "stale":
            self.counts["rollouts_dropped_stale"] += len(jobs) + len(group.done)
        return jobs

    def _take(self, group: RolloutGroup) -> bool:
        self._settle(group.id)
        stale = self._age_of(group) < self.limits.oldest_version(self.step)
        position = (group.environment, group.example)
        comes_again = stale and position in self._examples.unfinished  # as was on record
        if group.id == group_id(*position) and not comes_again:
            self._examples.mark_opened(position)
        if stale:
            self._count_stale(group.size)
            self._come_again(group.id, group.environment, group.example, group.task)
            return False
        self._examples.taken.add(group.id)
        return True

    def _count_stale(self, rollouts: int) -> None:
        self.counts["groups_dropped_stale"] += 1
        self.counts["rollouts_dropped_stale"] += rollouts


def _done(groups: Iterable[OpenGroup]) -> int:
    """Rollouts of groups that are done."""
    return sum(len(group.done) for group in groups)


def _choose(groups: Sequence[RolloutGroup], rollouts: int) -> list[RolloutGroup]:
    return [groups[index] for index in choose([group.size for group in groups], rollouts)]
