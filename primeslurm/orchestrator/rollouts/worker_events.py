"""Events of `WorkerPool`: what environment workers report to the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from primeslurm.orchestrator.rollouts.job_protocol import AnswerCounts, Job, JobFailure
from primeslurm.wire.batches.rollout import Rollout


class RolloutEnded(NamedTuple):
    """A job ended, with the token sequences of its rollout or with a failure."""

    job: str
    outcome: tuple[Rollout, ...] | JobFailure


class JobLost(NamedTuple):
    """The worker of a job is gone, so the job will not end."""

    job: str


class WorkerUnusable(NamedTuple):
    """A worker cannot serve its environment."""

    environment: str
    worker: int
    error: str


class WorkerDied(NamedTuple):
    """A worker died while it ran jobs. `JobLost` follows for each of them."""

    environment: str
    worker: int
    guilty: Sequence[Job]  # one job of each task that is now known to kill workers


class EnginesAnswered(NamedTuple):
    """A worker counted the answers of engines, by address."""

    answers: Mapping[str, AnswerCounts]


WorkerEvent = RolloutEnded | JobLost | WorkerUnusable | WorkerDied | EnginesAnswered


class JobKeeper(Protocol):
    """Decides which jobs and results the workers keep."""

    def adopt_job(self, job: Job, *, runs: bool) -> bool:
        """Adopt a job that an earlier orchestrator sent. `runs`: it has not ended. False: it is not needed."""

    def holds_result(self, job: str) -> bool:
        """Return whether a result is only in memory here, so that the worker must keep it."""


class KeepNothing:
    """A `JobKeeper` that adopts no job and keeps no result."""

    def adopt_job(self, job: Job, *, runs: bool) -> bool:
        return False

    def holds_result(self, job: str) -> bool:
        return False
