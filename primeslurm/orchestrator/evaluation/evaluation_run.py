"""State machine of one evaluation: which rollout runs next, which have ended, and which are tried again. No I/O.

Its rollouts have a limit of their own, besides that of training. Engines may receive new policies meanwhile, so each
sample records the policy versions that sampled it. Every sample ends: it fails after a fixed number of failures, and if
no rollout starts or ends for too long, all remaining samples fail. Tokens of engines do not count as progress, because
training shares the engines.
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
from primeslurm.orchestrator.evaluation.results import Sample
from primeslurm.orchestrator.rollouts.cache_salt import cache_salt, evaluation_prefix, has_prefix
from primeslurm.orchestrator.rollouts.groups import traces_of
from primeslurm.orchestrator.rollouts.job_protocol import Cause, Job
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.wire.batches.rollout import LARGEST_REWARD, Rollout

# Label, example, sample.
SampleKey = tuple[str, int, int]


class EvaluationRun:
    """See the module docstring.

    Args:
        salt: prefix of all cache salts. Training rollouts must not have it.
        start_timeout_s: remaining samples fail if none is in flight and none could start for this long.
        rollout_timeout_s: remaining samples fail if some are in flight and none started or ended for this long.
    """

    def __init__(
        self,
        step: int,
        version: int,
        environments: Sequence[EvaluationEnvironment],
        *,
        max_inflight: int,
        routers: Sequence[str],
        salt_prefix: str,
        incarnation: str,
        start_timeout_s: float,
        rollout_timeout_s: float,
        ended: Iterable[Sample] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step, self.version = step, version
        self.samples: dict[SampleKey, Sample] = {(s.label, s.example, s.sample): s for s in ended}
        self._sizes = {each.label: (each.examples, each.samples) for each in environments}
        self._todo = {label: deque(self._missing(label)) for label in self._sizes}
        self._max_inflight = max_inflight
        self._routers = list(routers)
        self._salt_prefix = evaluation_prefix(salt_prefix, step)
        self._prefix = f"evaluation-{step}-{incarnation}"
        self._start_timeout_s, self.rollout_timeout_s = start_timeout_s, rollout_timeout_s
        self._clock = clock
        self._progress_at = clock()
        self._jobs: dict[str, tuple[SampleKey, str]] = {}  # Sample and router of each job in flight
        # All jobs so far. A worker repeats for a while that it holds an ended job, which must not be adopted.
        self._seen: set[str] = set()
        self._failures: Counter[tuple[SampleKey, Cause]] = Counter()
        self._serial = count()

    @property
    def inflight(self) -> int:
        return len(self._jobs)

    @property
    def load(self) -> Counter[str]:
        """Number of rollouts in flight on each replica, by router."""
        return Counter(router for _, router in self._jobs.values())

    @property
    def total(self) -> int:
        return sum(examples * samples for examples, samples in self._sizes.values())

    @property
    def complete(self) -> bool:
        return len(self.samples) == self.total

    @property
    def labels(self) -> Collection[str]:
        return self._sizes.keys()

    def runs(self, job: str) -> bool:
        return job in self._jobs

    def limit(self, tasks: Mapping[str, int]) -> None:
        """Reduce the examples of environments that have fewer tasks. `tasks` has their number of tasks, by label."""
        for label, number in tasks.items():
            examples, samples = self._sizes.get(label, (0, 0))
            if number < examples:
                self._sizes[label] = (number, samples)
                self._todo[label] = deque(key for key in self._todo[label] if key[1] < number)
                self.samples = {key: s for key, s in self.samples.items() if key[0] != label or key[1] < number}

    def wait(self) -> None:
        """Restart the timeouts, because the engines have no policy at the moment."""
        self._progress_at = self._clock()

    def next_job(self, available: Iterable[str], version: int) -> Job | None:
        """Dispatch the next rollout, or return None if none may start now.

        `available` are the labels of the environments that have a worker, `version` is the engines' policy version.
        """
        # The environment with the fewest rollouts in flight is next.
        labels = [label for label in available if self._todo.get(label)]
        if self.inflight >= self._max_inflight or not labels or not self._routers:
            return None
        load = Counter(key[0] for key, _ in self._jobs.values())
        key = self._todo[min(labels, key=lambda label: load[label])].popleft()
        label, example, sample = key
        # All samples of an example share the KV cache of their prompt on one replica.
        router = self._routers[example % len(self._routers)]
        job = f"{self._prefix}-{next(self._serial)}/{label}/{example}.{sample}"
        self._start(job, key, router)
        group = f"{self._prefix}/{label}-{example}"
        salt = cache_salt(self._salt_prefix, version)
        return Job(job, group, label, example, version, router, salt, task=example)

    def adopt_job(self, job: Job) -> bool:
        """Continue a job of an earlier orchestrator of this attempt. Return whether that is possible."""
        # Not if the job is of another evaluation, its sample has ended or is in flight, or its replica is lost.
        sample = job.id.rpartition(".")[2]
        # The cache salt names the run, attempt and step of the evaluation that dispatched the job.
        if not has_prefix(job.cache_salt, self._salt_prefix) or job.task is None or not sample.isdecimal():
            return False
        key = (job.environment, job.task, int(sample))
        todo = self._todo.get(job.environment, deque())
        if job.id in self._seen or key not in todo or job.router not in self._routers:
            return False
        # The worker continues it, so it must not be dispatched again.
        todo.remove(key)
        self._start(job.id, key, job.router)
        return True

    def finished(self, job: str, sequences: tuple[Rollout, ...]) -> Sample:
        """Turn the rollout of a job into a sample. Raises KeyError if the job is not in flight."""
        return self._end(_sample(self._take(job), sequences))

    def failed(self, job: str, error: str, cause: Cause = "environment") -> Sample | None:
        """Try a failed rollout again. After too many failures, return its failed sample instead."""
        key = self._take(job)
        # Each cause has its own limit: an engine's failure says less about a sample than its environment's.
        self._failures[key, cause] += 1
        if self._failures[key, cause] >= MAX_FAILURES[cause]:
            return self._end(_failed_sample(key, error))
        self._todo[key[0]].append(key)  # at the end, so that a bad example does not delay the others
        return None

    def lost(self, job: str) -> None:
        """Run a job's rollout again, because its worker is lost. This does not count as a failure."""
        key = self._take(job)
        self._todo[key[0]].append(key)

    def give_up(self, label: str, example: int, error: str) -> tuple[list[Sample], list[str]]:
        """Fail the remaining samples of an example. Return them, and the jobs to cancel."""
        jobs = [job for job, (key, _) in self._jobs.items() if key[:2] == (label, example)]
        waiting = [key for key in self._todo[label] if key[1] == example]
        self._todo[label] = deque(key for key in self._todo[label] if key[1] != example)
        return [self._end(_failed_sample(key, error)) for key in [*waiting, *map(self._take, jobs)]], jobs

    def drop_router(self, router: str) -> list[str]:
        """Remove a lost replica. Return the jobs to cancel; their rollouts run again on other replicas."""
        self._routers.remove(router)
        jobs = [job for job, (_, job_router) in self._jobs.items() if job_router == router]
        for job in jobs:
            key = self._take(job)
            self._todo[key[0]].appendleft(key)  # in front, because they had started already
        return jobs

    def expire(self) -> tuple[list[Sample], list[str]]:
        """Fail all remaining samples if a timeout has passed. Return them, and the jobs to cancel."""
        timeout_s = self.rollout_timeout_s if self._jobs else self._start_timeout_s
        if self.complete or self._clock() - self._progress_at < timeout_s:
            return [], []
        error = f"no rollout of the evaluation started or ended for {timeout_s:g} s"
        jobs = list(self._jobs)
        remaining = [self._jobs.pop(job)[0] for job in jobs] + [key for todo in self._todo.values() for key in todo]
        for todo in self._todo.values():
            todo.clear()
        return [self._end(_failed_sample(key, error)) for key in remaining], jobs

    def _missing(self, label: str) -> list[SampleKey]:
        examples, samples = self._sizes[label]
        keys = [(label, example, sample) for example in range(examples) for sample in range(samples)]
        return [key for key in keys if key not in self.samples]

    def _start(self, job: str, key: SampleKey, router: str) -> None:
        self._progress_at = self._clock()
        self._seen.add(job)
        self._jobs[job] = (key, router)

    def _take(self, job: str) -> SampleKey:
        self._progress_at = self._clock()
        return self._jobs.pop(job)[0]

    def _end(self, sample: Sample) -> Sample:
        self.samples[(sample.label, sample.example, sample.sample)] = sample
        return sample


def _failed_sample(key: SampleKey, error: str) -> Sample:
    return Sample(*key, error=error[:1000])


def _sample(key: SampleKey, sequences: tuple[Rollout, ...]) -> Sample:
    infos = [trace[0].info for trace in traces_of(sequences)]
    reward = fmean(info.reward for info in infos)  # mean over the traces of several agents
    if not math.isfinite(reward):
        return _failed_sample(key, f"its reward is {reward}")
    metrics: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(info.metrics.items() for info in infos):
        if abs(value) <= LARGEST_REWARD:  # larger values would overflow in means
            metrics.setdefault(name, []).append(value)
    versions = np.concatenate([sequence.versions[sequence.mask] for sequence in sequences])
    return Sample(
        *key,
        reward=reward,
        tokens=len(versions),
        turns=sum(info.turns for info in infos),
        finish_reason=next((info.finish_reason for info in infos if info.finish_reason == "length"), "stop"),
        seconds=infos[0].seconds,
        oldest_version=int(versions.min()) if len(versions) else -1,
        newest_version=int(versions.max(initial=-1)),
        metrics={name: fmean(values) for name, values in metrics.items()},
    )
