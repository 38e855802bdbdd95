"""Which attempt of a run the start of a job uses, and whether the job owns the run at all."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import msgspec

from primeslurm.base import files
from primeslurm.base.errors import RunError
from primeslurm.records.attempt import JobRecord, StartRecord, newest_attempt
from primeslurm.records.reserve import Reserve, until_written
from primeslurm.run.claims import NotOwnerError, claim_attempt, claim_start, owner
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.launch_failures import START

PLAN_WAIT_S = 120.0
_POLL_S = 0.5


def this_start(environ: Mapping[str, str], job_id: str) -> StartRecord:
    """Return the record of the start that this process belongs to: the batch script has named it."""
    return StartRecord(environ[START], job_id, socket.gethostname(), time.time())


def enter(
    run: RunDirectory, submission: str, start: StartRecord, *, first: int = 1, wait_s: float, visible_s: float = 0.0
) -> Attempt:
    """Return the attempt that a start of a job uses; claim it if nobody has done so after a while.

    The first start of a job uses the attempt that was submitted; each later one gets a new attempt. The head claims it
    at once. Other agents wait for the head, and claim it themselves if the head does not come.

    On a full or read-only file system a claim is tried again, until the attempt would have ended for want of progress.

    Args:
        run: the run.
        submission: that the job was made for.
        start: of the job.
        first: number of the attempt that was submitted.
        wait_s: how long to wait for somebody else's claim, in seconds.
        visible_s: how long to wait for the attempt that was submitted, in seconds: a network file system may show it
            late.

    Raises:
        NotOwnerError: another job owns the run.
        RunError: the run has no such attempt.
        OSError: its directory cannot be made.
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
        _refuse_stranger(newest, job, used_by, submission, start)
        if used_by is not None and used_by.word == start.word:
            return newest
        if time.monotonic() - began >= wait_s:
            _claim(run, newest, job, used_by, start)
        else:
            _wait(run)


def _wait(run: RunDirectory) -> None:
    """Wait for what another node writes: have this node ask the file system's server for new names afterwards."""
    time.sleep(_POLL_S)
    files.revalidate(run.path / "attempts")


def _newest(run: RunDirectory, first: int) -> Attempt | None:
    # One listing and one look: every agent of a large job asks for this twice a second until the head is there.
    attempt = run.attempt(newest_attempt(run.path))
    return attempt if attempt.number >= first and files.is_file(attempt.plan_file) else None


def _refuse_stranger(
    newest: Attempt, job: JobRecord, used_by: StartRecord | None, submission: str, start: StartRecord
) -> None:
    """Raise NotOwnerError if the newest attempt is not of this job."""
    job_ids = {job.job_id, used_by.job_id if used_by is not None else ""} - {""}
    if job.submission != submission or job_ids - {start.job_id}:
        raise NotOwnerError(
            f"run {newest.path.parents[1]} belongs to {owner(newest)}; job {start.job_id} ends without touching it"
        )


def _claim(run: RunDirectory, newest: Attempt, job: JobRecord, used_by: StartRecord | None, start: StartRecord) -> None:
    """Claim the newest attempt if no start uses it, else the next one. Somebody else may be faster."""
    plan = newest.plan()
    job = msgspec.structs.replace(job, job_id=start.job_id)

    def claim() -> None:
        if used_by is not None:
            claim_attempt(run, newest.number + 1, plan, job, start)
        elif claim_start(newest, start):
            newest.record_job(job)  # whoever has submitted it may have been killed before it was told the id

    reserve = Reserve(run.path)
    until_written(lambda: reserve.spend_on(claim), plan.stall_timeout_s)
