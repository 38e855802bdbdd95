"""What went wrong in an attempt: its first failure, what followed, known causes, and whether the run is valid."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from primeslurm.files import read_json
from primeslurm.records.attempt import JobRecord
from primeslurm.records.base import Event
from primeslurm.run.diagnosis import failure_signatures
from primeslurm.run.diagnosis.failure_signatures import Cause
from primeslurm.run.diagnosis.failures import Failure, failures, silent
from primeslurm.run.diagnosis.logs import error_line, lines_until
from primeslurm.run.diagnosis.validity import MAX_KL, problems
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.records import attempt_events, dropped_of, rows
from primeslurm.run.status.event_text import EventText, notable
from primeslurm.run.status.placement import RunPlacement, placement_of

LAST_LINES = 20
FOLLOWED = 15
MOMENT_S = 1.0
TOGETHER_S = 10.0
"""Failures this close together have one cause; which process ended first among them is chance."""


class ExaminedFailure(msgspec.Struct, frozen=True):
    """A failure with what its log says."""

    failure: Failure
    log: str = ""
    """Path of the log; empty if there is none."""
    error: str | None = None
    last_lines: list[str] = []
    causes: list[Cause] = []


class AttemptLine(msgspec.Struct, frozen=True):
    """One attempt in a line."""

    number: int
    outcome: str
    reason: str
    committed_step: int | None


class Diagnosis(msgspec.Struct, frozen=True):
    """What `primeslurm doctor RUN --json` prints."""

    run: str
    attempt: int
    outcome: str
    """As end.json says, or running, or Slurm's word for a job that ended without a word of its own."""
    reason: str
    first: ExaminedFailure | None
    followed: list[EventText]
    """Errors and warnings after the first failure, oldest first."""
    recovered: list[Failure]
    """Failures that the run got over by itself."""
    invalid: list[str]
    """Why the run, though it may work, is of no use."""
    attempts: list[AttemptLine]

    @property
    def well(self) -> bool:
        """Whether there is nothing to find."""
        return self.first is None and not self.invalid


def diagnose(
    run: RunDirectory, attempt: Attempt, job_state: Callable[[JobRecord], str | None], max_kl: float = MAX_KL
) -> Diagnosis:
    """Read everything that an attempt left and name what failed first.

    Args:
        run: the run.
        attempt: the one in question.
        job_state: Slurm's word for a job.
        max_kl: largest accepted median of the KL between trainer and engines.

    Raises:
        RunError: the attempt has no readable plan.
    """
    placement = placement_of(attempt)
    happened = attempt_events(attempt)
    failed = failures(happened, attempt.heartbeats())
    outcome, reason = _outcome(attempt, job_state)
    failed += silent(attempt.fleet()) if outcome in _UNDER_WAY else []
    open_ = [failure for failure in failed if not failure.recovered]
    if not open_ and outcome not in _GOOD:
        open_ = [_end_itself(attempt, happened, outcome, reason)]
    first = _first([_examine(run, attempt, placement, failure) for failure in _together(open_)])
    recipe = read_json(run.path / "recipe.resolved.json") or {}
    batch_size = int(recipe.get("orchestrator", {}).get("batch_size", 0))
    return Diagnosis(
        run=run.name,
        attempt=attempt.number,
        outcome=outcome,
        reason=reason,
        first=first,
        followed=_followed(first, notable(happened)),
        recovered=[failure for failure in failed if failure.recovered],
        invalid=problems(rows(run.path), dropped_of(attempt), batch_size, max_kl),
        attempts=[_line(each) for each in run.attempts()],
    )


_UNDER_WAY = ("running", "RUNNING")
_GOOD = ("running", "completed", "cancelled", "preempted", "PENDING", "RUNNING")


def _outcome(attempt: Attempt, job_state: Callable[[JobRecord], str | None]) -> tuple[str, str]:
    if end := attempt.end():
        return end.outcome, end.reason
    state = job_state(job) if (job := attempt.job()) else None
    if state is None:
        return "lost", "the attempt left no word of its end, and no such job is known"
    return ("running" if state.startswith("RUNNING") else state.partition(" ")[0]), state


def _end_itself(attempt: Attempt, happened: Sequence[Event], outcome: str, reason: str) -> Failure:
    """Where no event tells of a failure, the end of the job is one."""
    end = attempt.end()
    at = end.time if end else (happened[-1].time if happened else 0.0)
    return Failure(at, (end.suspect if end else "") or "job", "", reason if end else f"{outcome}: {reason}")


def _together(found: Sequence[Failure]) -> list[Failure]:
    return [failure for failure in found if failure.time - found[0].time <= TOGETHER_S]


def _first(found: Sequence[ExaminedFailure]) -> ExaminedFailure | None:
    """Among failures at about the same time: one with a reason of its own comes first, one that blames others last."""
    return min(found, key=lambda each: (_excuse(each), each.failure.time), default=None)


def _excuse(examined: ExaminedFailure) -> int:
    """0: it says why, or was killed; 1: nothing is known; 2: its log only complains about others."""
    symptoms = {known.cause for known in failure_signatures.KNOWN if known.symptom}
    if examined.causes and all(cause.cause in symptoms for cause in examined.causes):
        return 2
    return 0 if examined.causes or examined.error else 1


def _examine(run: RunDirectory, attempt: Attempt, placement: RunPlacement, failure: Failure) -> ExaminedFailure:
    path = _log_of(run, attempt, placement, failure)
    lines = lines_until(path, failure.time) if path else []
    known = [Cause(cause.cause, cause.fix, line) for cause, line in failure_signatures.in_log(lines[-2000:])]
    return ExaminedFailure(
        failure,
        log=str(path or ""),
        error=error_line(lines),
        last_lines=lines[-LAST_LINES:],
        causes=known
        or failure_signatures.of_reason(failure.how)
        or failure_signatures.of_exit(failure.code)
        or _of_job(failure),
    )


def _of_job(failure: Failure) -> list[Cause]:
    return failure_signatures.of_job(failure.how.partition(":")[0]) if failure.component == "job" else []


def _log_of(run: RunDirectory, attempt: Attempt, placement: RunPlacement, failure: Failure) -> Path | None:
    for process in placement.processes():
        if process.name == failure.component:
            return attempt.path / process.log
    if failure.component == "job" or re.match(r"agent-\d+$|head$", failure.component):
        outputs = sorted([*run.path.glob("slurm-*.out"), *(run.path / "submitit").glob("*.out")])
        return max(outputs, key=lambda path: path.stat().st_mtime, default=None)
    return None


def _followed(first: ExaminedFailure | None, told: Sequence[EventText]) -> list[EventText]:
    if first is None:
        return []
    # What happened within the same moment was noticed in the order in which agents looked.
    after = [h for h in told if h.time >= first.failure.time - MOMENT_S and h.who != first.failure.component]
    return [h for h in after if h.level != "info" or h.who == "head"][:FOLLOWED]


def _line(attempt: Attempt) -> AttemptLine:
    end = attempt.end()
    if end is None:
        return AttemptLine(attempt.number, "no end", "", None)
    return AttemptLine(attempt.number, end.outcome, end.reason, end.committed_step)
