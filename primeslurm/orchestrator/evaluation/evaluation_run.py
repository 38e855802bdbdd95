"""One evaluation: which rollouts run next, which have ended, which are tried again. A pure state machine.

Its rollouts count toward a bound of their own, beside those of training. Engines take new policies while it goes on:
a rollout is sampled by the policies that its engine has meanwhile, and says which. Every sample ends: after a bounded
number of failures it counts as failed, and an evaluation of which nothing begins or ends for too long fails the rest.
Engines' tokens say nothing of that: an engine that training shares has them whatever becomes of the evaluation.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, count
from statistics import fmean

import numpy as np

from primeslurm.orchestrator.dispatch.dispatcher import MAX_FAILURES
from primeslurm.orchestrator.evaluation.statistics import Sample
from primeslurm.orchestrator.rollouts.groups import traces_of
from primeslurm.orchestrator.rollouts.job_protocol import Cause, Job
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.wire.batches.rollouts import Rollout

Place = tuple[str, int, int]
"""Label, example, sample."""


class EvaluationRun:
    """See the module docstring.

    Args:
        step: that is evaluated.
        version: policy version that the engines had when it began.
        environments: to evaluate on.
        max_inflight: rollouts in flight at once.
        routers: that rollouts are spread over.
        salt: prefix of every cache salt: no training rollout has it.
        incarnation: makes job ids unique over restarts of the orchestrator.
        patience_s: the rest has failed when none could begin for so long, and none runs.
        longest_s: the rest has failed when some run, and none began or ended for so long: the longest time of one.
        ended: samples that ended before a restart.
    """

    def __init__(
        self,
        step: int,
        version: int,
        environments: Sequence[EvaluationEnvironment],
        *,
        max_inflight: int,
        routers: Sequence[str],
        salt: str,
        incarnation: str,
        patience_s: float,
        longest_s: float,
        ended: Iterable[Sample] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step, self.version = step, version
        self.samples: dict[Place, Sample] = {(s.label, s.example, s.sample): s for s in ended}
        self._sizes = {each.label: (each.examples, each.samples) for each in environments}
        self._todo = {label: deque(self._missing(label)) for label in self._sizes}
        self._max_inflight = max_inflight
        self._routers = list(routers)
        self._salt = f"{salt}:evaluation-{step}"
        self._prefix = f"evaluation-{step}-{incarnation}"
        self._patience_s, self.longest_s = patience_s, longest_s
        self._clock = clock
        self._moved_at = clock()
        self._jobs: dict[str, tuple[Place, str]] = {}
        self._known: set[str] = set()
        """Jobs that run, or did: a worker holds what has ended, and goes on saying so for a while."""
        self._failures: Counter[tuple[Place, Cause]] = Counter()
        self._serial = count()

    @property
    def inflight(self) -> int:
        """Return how many rollouts run."""
        return len(self._jobs)

    @property
    def load(self) -> Counter[str]:
        """Return how many of them run on each replica, by router."""
        return Counter(router for _, router in self._jobs.values())

    @property
    def total(self) -> int:
        """Return how many samples there are."""
        return sum(examples * samples for examples, samples in self._sizes.values())

    @property
    def complete(self) -> bool:
        """Tell whether every sample has ended."""
        return len(self.samples) == self.total

    @property
    def labels(self) -> Collection[str]:
        """Return the labels of the environments that are evaluated on."""
        return self._sizes.keys()

    def runs(self, job: str) -> bool:
        """Tell whether a job is in flight."""
        return job in self._jobs

    def limit(self, tasks: Mapping[str, int]) -> None:
        """Take how many tasks environments have, by label: there are no more examples than tasks."""
        for label, number in tasks.items():
            examples, samples = self._sizes.get(label, (0, 0))
            if number < examples:
                self._sizes[label] = (number, samples)
                self._todo[label] = deque(place for place in self._todo[label] if place[1] < number)
                self.samples = {p: s for p, s in self.samples.items() if p[0] != label or p[1] < number}

    def wait(self) -> None:
        """Count no time: there is no policy to evaluate, as engines load."""
        self._moved_at = self._clock()

    def next_job(self, available: Iterable[str], version: int) -> Job | None:
        """Dispatch the next rollout: of the environment that has the fewest in flight.

        Args:
            available: labels of the environments that have a worker.
            version: policy version that the engines have.

        Returns:
            None if nothing may start now.
        """
        labels = [label for label in available if self._todo.get(label)]
        if self.inflight >= self._max_inflight or not labels or not self._routers:
            return None
        load = Counter(place[0] for place, _ in self._jobs.values())
        place = self._todo[min(labels, key=lambda label: load[label])].popleft()
        label, example, sample = place
        # All samples of an example share its prompt in one replica's cache.
        router = self._routers[example % len(self._routers)]
        job = f"{self._prefix}-{next(self._serial)}/{label}/{example}.{sample}"
        self._start(job, place, router)
        group = f"{self._prefix}/{label}-{example}"
        # A prefix that an older policy computed is of no use to a newer one.
        salt = f"{self._salt}:{version}"
        return Job(job, group, label, example, version, router, salt, task=example)

    def adopt_job(self, job: Job) -> bool:
        """Go on with a job that another orchestrator of this attempt has dispatched.

        Returns:
            False if nobody wants it: it is of something else, its sample has ended or runs, or its replica is gone.
        """
        sample = job.id.rpartition(".")[2]
        if not job.cache_salt.startswith(f"{self._salt}:") or job.task is None or not sample.isdecimal():
            return False
        place = (job.environment, job.task, int(sample))
        todo = self._todo.get(job.environment, deque())
        if job.id in self._known or place not in todo or job.router not in self._routers:
            return False
        todo.remove(place)
        self._start(job.id, place, job.router)
        return True

    def finished(self, job: str, sequences: tuple[Rollout, ...]) -> Sample:
        """Take the rollout that a job made; returns its sample. Raises KeyError if the job is not in flight."""
        return self._end(_sample(self._take(job), sequences))

    def failed(self, job: str, error: str, cause: Cause = "environment") -> Sample | None:
        """Try the rollout of a failed job again, or have its sample end as failed; then it is returned."""
        place = self._take(job)
        self._failures[place, cause] += 1
        return self._again(place, error, give_up=self._failures[place, cause] >= MAX_FAILURES[cause])

    def lost(self, job: str) -> None:
        """Dispatch a job again, as its worker is gone."""
        self._again(self._take(job), "", give_up=False)

    def give_up(self, label: str, example: int, error: str) -> tuple[list[Sample], list[str]]:
        """Fail the rest of an example's samples.

        Returns:
            The samples, and the jobs to cancel.
        """
        jobs = [job for job, (place, _) in self._jobs.items() if place[:2] == (label, example)]
        waiting = [place for place in self._todo[label] if place[1] == example]
        self._todo[label] = deque(place for place in self._todo[label] if place[1] != example)
        return [self._end(_failed(place, error)) for place in [*waiting, *map(self._take, jobs)]], jobs

    def drop_router(self, router: str) -> list[str]:
        """Do without a replica that is gone; returns the jobs to cancel, which are dispatched again."""
        self._routers.remove(router)
        jobs = [job for job, (_, where) in self._jobs.items() if where == router]
        for job in jobs:
            place = self._take(job)
            self._todo[place[0]].appendleft(place)
        return jobs

    def expire(self) -> tuple[list[Sample], list[str]]:
        """Fail the rest if nothing moves for too long; returns the samples, and the jobs to cancel."""
        patience_s = self.longest_s if self._jobs else self._patience_s
        if self.complete or self._clock() - self._moved_at < patience_s:
            return [], []
        error = f"no rollout of the evaluation began or ended for {patience_s:g} s"
        jobs = list(self._jobs)
        left = [self._jobs.pop(job)[0] for job in jobs] + [place for todo in self._todo.values() for place in todo]
        for todo in self._todo.values():
            todo.clear()
        return [self._end(_failed(place, error)) for place in left], jobs

    def _missing(self, label: str) -> list[Place]:
        examples, samples = self._sizes[label]
        places = [(label, example, sample) for example in range(examples) for sample in range(samples)]
        return [place for place in places if place not in self.samples]

    def _start(self, job: str, place: Place, router: str) -> None:
        self._moved_at = self._clock()
        self._known.add(job)
        self._jobs[job] = (place, router)

    def _take(self, job: str) -> Place:
        self._moved_at = self._clock()
        return self._jobs.pop(job)[0]

    def _end(self, sample: Sample) -> Sample:
        self.samples[(sample.label, sample.example, sample.sample)] = sample
        return sample

    def _again(self, place: Place, error: str, *, give_up: bool) -> Sample | None:
        if give_up:
            return self._end(_failed(place, error))
        self._todo[place[0]].append(place)
        return None


def _failed(place: Place, error: str) -> Sample:
    return Sample(*place, error=error[:1000])


def _sample(place: Place, sequences: tuple[Rollout, ...]) -> Sample:
    """Its reward is that of its trace, or the mean over the traces of several agents."""
    infos = [trace[0].info for trace in traces_of(sequences)]
    reward = fmean(info.reward for info in infos)
    if not math.isfinite(reward):
        return _failed(place, f"its reward is {reward}")
    metrics: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(info.metrics.items() for info in infos):
        if math.isfinite(value):
            metrics.setdefault(name, []).append(value)
    versions = np.concatenate([sequence.versions[sequence.mask] for sequence in sequences])
    return Sample(
        *place,
        reward=reward,
        tokens=len(versions),
        turns=sum(info.turns for info in infos),
        finish_reason=next((info.finish_reason for info in infos if info.finish_reason == "length"), "stop"),
        seconds=infos[0].seconds,
        oldest_version=int(versions.min()) if len(versions) else -1,
        newest_version=int(versions.max(initial=-1)),
        metrics={name: fmean(values) for name, values in metrics.items()},
    )
