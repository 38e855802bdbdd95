"""Events of evaluations."""

from __future__ import annotations

from primeslurm.records.record import Event


class EvaluationStarted(Event, frozen=True, tag="evaluation_started"):
    """An evaluation begins, or resumes after a restart."""

    step: int
    version: int  # policy version of the engines
    ended: int = 0  # samples that an earlier attempt completed


class EvaluationDone(Event, frozen=True, tag="evaluation_done"):
    """The results of an evaluation are on disk."""

    step: int
    seconds: float = 0.0
    rewards: dict[str, float] = {}  # mean by environment
    failed: int = 0  # samples that failed in every try


class EvaluationSkipped(Event, frozen=True, tag="evaluation_skipped"):
    """An evaluation that was due does not take place."""

    step: int
    why: str = ""


class EvaluationSampleFailed(Event, frozen=True, tag="evaluation_sample_failed"):
    """A rollout of an evaluation failed. It is retried a few times."""

    job: str = ""
    error: str = ""
