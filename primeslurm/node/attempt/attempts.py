"""Which attempt of a run a job is in, and its directory."""

from __future__ import annotations

import time

from primeslurm import files
from primeslurm.records.reserve import Reserve, until_written
from primeslurm.run.directory import Attempt, RunDirectory

PLAN_WAIT_S = 120.0
_POLL_S = 0.5


def enter(run: RunDirectory, number: int, *, wait_s: float) -> Attempt:
    """Return an attempt that has its plan. After a requeue the head makes it from the one before; others wait for it.

    On a full or read-only file system it is tried again, until the attempt would have ended for want of progress.

    Args:
        run: the run.
        number: of the attempt.
        wait_s: how long to wait, in seconds, before making it here: without a head it would never be there.

    Raises:
        RunError: the run has no attempt at all.
        OSError: its directory cannot be made.
    """
    attempt = run.attempt(number)
    deadline = time.monotonic() + wait_s
    while not files.is_file(attempt.plan_file):
        if time.monotonic() >= deadline:
            _make_in_time(run, attempt)
            break
        time.sleep(_POLL_S)
        files.revalidate(attempt.path.parent)  # the head makes it on another node: ask the server for new names
        files.revalidate(attempt.path)
    return attempt


def _make_in_time(run: RunDirectory, attempt: Attempt) -> None:
    patience_s = run.latest().plan().stall_timeout_s
    reserve = Reserve(run.path)
    until_written(lambda: reserve.spend_on(lambda: _make(run, attempt)), patience_s)


def first_of_job(run: RunDirectory, job_id: str) -> int:
    """Find the number of the attempt that a job began with.

    Raises:
        RunError: the run has no attempt at all.
    """
    jobs = {attempt.number: attempt.job() for attempt in run.attempts()}
    own = [number for number, job in jobs.items() if job is not None and job.job_id == job_id]
    return min(own, default=run.latest().number)


def _make(run: RunDirectory, attempt: Attempt) -> None:
    if files.is_file(attempt.plan_file):
        return  # another agent was faster
    previous = run.latest()
    plan = previous.plan()
    if job := previous.job():
        attempt.record_job(job)
    attempt.prepare(plan)  # from then on it is the newest one: without a job, it would look lost
