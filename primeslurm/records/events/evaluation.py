"""Events of evaluations."""

from __future__ import annotations

from primeslurm.records.record import Event


class EvaluationStarted(Event, frozen=True, tag="evaluation_started"):
    """An evaluation begins, or goes on after a restart."""

    step: int
    version: int
    """Policy version that the engines have."""
    ended: int = 0
    """Samples that were there already."""


class EvaluationDone(Event, frozen=True, tag="evaluation_done"):
    """The results of an evaluation are on disk."""

    step: int
    seconds: float = 0.0
    rewards: dict[str, float] = {}
    """Mean by environment."""
    failed: int = 0
    """Samples that ended with an error each time they were tried."""


class EvaluationSkipped(Event, frozen=True, tag="evaluation_skipped"):
    """An evaluation that was due is not made."""

    step: int
    why: str = ""


class EvaluationSampleFailed(Event, frozen=True, tag="evaluation_sample_failed"):
    """A rollout of an evaluation ended with an error; it is tried again a few times."""

    job: str = ""
    error: str = ""


EvaluationEvent = EvaluationStarted | EvaluationDone | EvaluationSkipped | EvaluationSampleFailed
