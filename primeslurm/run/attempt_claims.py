"""Which job owns a run: the job that has claimed the newest attempt.

Both claims are made in the same way: a directory with a unique name is filled, and then renamed to the name that
everybody wants. A rename to a directory that is not empty fails, so exactly one process succeeds, on network file
systems, too. Who has lost never removes or replaces what the owner has written.
"""

from __future__ import annotations

import errno
import secrets
import time
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError, Violation
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import JobRecord, StartRecord
from primeslurm.run.directory import START_FILE, Attempt, RunDirectory

_NAME_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)


class NotOwnerError(RunError):
    """Another job owns the run."""


def new_token() -> str:
    """Return a word that nobody else uses."""
    return secrets.token_hex(12)


def claim_attempt(
    run: RunDirectory, number: int, plan: Plan, job: JobRecord, start: StartRecord | None = None
) -> Attempt | None:
    """Make an attempt, complete with its plan and job. None if somebody else has made it.

    Args:
        run: of the attempt.
        number: of the attempt: the newest one's, plus one.
        plan: of the attempt.
        job: that is to use the attempt, or uses it already.
        start: of the job, if it has started.

    Raises:
        OSError: it cannot be written.
    """
    staged = Attempt(run.path, number, f".{number}.{new_token()}")
    attempt = run.attempt(number)
    try:
        staged.record_job(job)
        if start is not None:
            durable.make_directory(staged.start_directory)
            durable.write_json(staged.start_directory / START_FILE, msgspec.to_builtins(start))
        staged.prepare(plan)
        return attempt if _rename(staged.path, attempt.path) else None
    finally:
        files.remove_tree(staged.path, ignore_errors=True)


def claim_start(attempt: Attempt, start: StartRecord) -> bool:
    """Use an attempt for the start of a job. False if another start uses it. Raises OSError."""
    staged = attempt.path / f".start.{new_token()}"
    try:
        durable.make_directory(staged)
        durable.write_json(staged / START_FILE, msgspec.to_builtins(start))
        return _rename(staged, attempt.start_directory)
    finally:
        files.remove_tree(staged, ignore_errors=True)


def _rename(staged: Path, target: Path) -> bool:
    """Rename a directory unless the name is taken. Returns whether this call has succeeded."""
    try:
        files.retrying(staged, lambda: staged.rename(target))
    except OSError as error:
        if error.errno not in _NAME_TAKEN:
            raise
        # An NFS client that repeats a rename whose answer was lost is told that there is nothing to rename. Nobody
        # else knows the staged name, so the first try has succeeded if that name is gone.
        if files.exists(staged) or not files.exists(target):
            return False
    durable.sync(target.parent)
    return True


def owner(attempt: Attempt) -> str:
    """Say which job owns an attempt, for people: its id, where it was submitted, and since when."""
    job, start = attempt.job(), attempt.start()
    if job is None:
        return f"attempt {attempt.number}"
    job_id = start.job_id if start is not None else job.job_id
    what = f"{job.executor} job {job_id}" if job_id else f"a {job.executor} job that is being submitted"
    where = f" from {job.host}" if job.host else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted_at))
    return f"{what} (attempt {attempt.number}, submitted{where} at {since})"


def moved_or_copied(run_dir: Path, plan: Plan) -> list[Violation]:
    """Return a violation if a run directory is a copy, or was moved: its plan has absolute paths, of the original."""
    original = Path(plan.run_dir)
    if _same_directory(run_dir, original):
        return []
    if files.is_dir(original):
        why = f"is a copy of {original}: everything that its plan starts uses that directory"
        fix = f"use {original} itself; `primeslurm export` makes a model of it that another run can start from"
    else:
        why = f"was moved: its plan was made for {original}"
        fix = f"move it back, or `ln -s {run_dir} {original}`"
    return [Violation("RUN", str(run_dir), why, fix)]


def _same_directory(one: Path, other: Path) -> bool:
    try:
        if files.retrying(one, lambda: one.samefile(other)):
            return True
        # A file system that is mounted twice has two device numbers: what is written through one path is there under
        # the other.
        probe = one / f".same.{new_token()}"
        files.write_atomic(probe, "")
        try:
            return files.exists(other / probe.name)
        finally:
            files.unlink(probe)
    except OSError:
        return False
