"""Finds the attempt that a start of a job uses, and refuses jobs that do not own the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError
from primeslurm.records.attempt import JobRecord, StartRecord, newest_attempt
from primeslurm.run.attempt_claims import NotOwnerError, claim_attempt, claim_start, owner
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.launch_failures import START

PLAN_WAIT_S = 120.0
_POLL_S = 0.5


def this_start(environ: Mapping[str, str], job_id: str) -> StartRecord:
    """Return the record of the start that this process belongs to. The batch script has given it a word."""
    return StartRecord(environ[START], job_id, socket.gethostname(), time.time())


def enter(
    run: RunDirectory, submission: str, start: StartRecord, *, first: int = 1, wait_s: float, visible_s: float = 0.0
) -> Attempt:
    """Return the attempt that a start of a job uses, and claim it if nobody else does.

    The first start of a job uses the submitted attempt `first`. Each later start gets a new one. The head claims it at
    once. Other agents wait for that for `wait_s`, and claim it themselves if the head does not come. A network file
    system may show the submitted attempt as late as `visible_s`. On a full or read-only disk the claim is retried for
    the run's stall timeout.

    Raises:
        NotOwnerError: another job owns the run.
        RunError: the run has no such attempt.
        OSError: the attempt's directory cannot be made.
    """
    began = time.monotonic()
    while True:
        newest = _newest(run, first)
        job = newest.job() if newest is not None else None
        if newest is None or job is None:
            if time.monotonic() - began >= visible_s:
                raise RunError(f"{run.path} has no attempt {first} with a job")
            _wait(run)
            continue
        used_by = newest.start()
        _refuse_other_jobs(newest, job, used_by, submission, start)
        if used_by is not None and used_by.word == start.word:
            return newest
        if time.monotonic() - began >= wait_s:
            _claim(run, newest, job, used_by, start)
        else:
            _wait(run)


def _wait(run: RunDirectory) -> None:
    time.sleep(_POLL_S)
    files.revalidate(run.path / "attempts")  # another node makes the directory, so this node's cache is out of date


def _newest(run: RunDirectory, first: int) -> Attempt | None:
    # A single listing: every agent of a large job calls this twice a second until the head has claimed the attempt.
    attempt = run.attempt(newest_attempt(run.path))
    return attempt if attempt.number >= first and files.is_file(attempt.plan_file) else None


def _refuse_other_jobs(
    newest: Attempt, job: JobRecord, used_by: StartRecord | None, submission: str, start: StartRecord
) -> None:
    job_ids = {job.job_id, used_by.job_id if used_by is not None else ""} - {""}
    if job.submission != submission or job_ids - {start.job_id}:
        raise NotOwnerError(
            f"run {newest.path.parents[1]} belongs to {owner(newest)}; job {start.job_id} ends without touching it"
        )


def _claim(run: RunDirectory, newest: Attempt, job: JobRecord, used_by: StartRecord | None, start: StartRecord) -> None:
    """Claim the newest attempt if no start uses it, else the next one. Another process may be faster."""
    plan = newest.plan()
    job = msgspec.structs.replace(job, job_id=start.job_id)

    def claim() -> None:
        if used_by is not None:
            claim_attempt(run, newest.number + 1, plan, job, start)
        elif claim_start(newest, start):
            newest.record_job(job)  # the submitting process may have been killed before it knew the job's id

    durable.retry_until_written(claim, plan.stall_timeout_s)
