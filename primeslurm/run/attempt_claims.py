"""Exclusive ownership of a run: the job that claims the newest attempt owns the run.

A claim fills a directory with a unique name, and renames it to the final name. The rename fails if the target is a
directory that is not empty, so exactly one process succeeds, also on network file systems. A process that loses never
removes or replaces files of the owner.
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
    return secrets.token_hex(12)


def claim_attempt(
    run: RunDirectory, number: int, plan: Plan, job: JobRecord, start: StartRecord | None = None
) -> Attempt | None:
    """Create an attempt with its plan and job. Return None if another process created it. Raises OSError.

    `number` is the newest attempt's number plus one. `job` may still have to be submitted. `start` is set if it has
    started.
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
    """Claim an attempt for one start of a job. Return False if another start has it. Raises OSError."""
    staged = attempt.path / f".start.{new_token()}"
    try:
        durable.make_directory(staged)
        durable.write_json(staged / START_FILE, msgspec.to_builtins(start))
        return _rename(staged, attempt.start_directory)
    finally:
        files.remove_tree(staged, ignore_errors=True)


def _rename(staged: Path, target: Path) -> bool:
    try:
        files.retrying(staged, lambda: staged.rename(target))
    except OSError as error:
        if error.errno not in _NAME_TAKEN:
            raise
        # If the answer to a rename is lost, an NFS client repeats the rename and gets ENOENT. No other process knows
        # the staged name, so the first try succeeded if that name is gone.
        if files.exists(staged) or not files.exists(target):
            return False
    durable.sync(target.parent)
    return True


def owner(attempt: Attempt) -> str:
    """Describe the job that owns an attempt: its id, the host that submitted it, and when."""
    job, start = attempt.job(), attempt.start()
    if job is None:
        return f"attempt {attempt.number}"
    job_id = start.job_id if start is not None else job.job_id
    what = f"{job.executor} job {job_id}" if job_id else f"a {job.executor} job that is being submitted"
    where = f" from {job.host}" if job.host else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submitted_at))
    return f"{what} (attempt {attempt.number}, submitted{where} at {since})"


def moved_or_copied(run_dir: Path, plan: Plan) -> list[Violation]:
    """Return a violation if a run directory was copied or moved: its plan has absolute paths of the original."""
    original = Path(plan.run_dir)
    if _same_directory(run_dir, original):
        return []
    if files.is_dir(original):
        why = f"is a copy of {original}, and all processes of its plan would use {original}"
        fix = f"use {original} itself; `primeslurm export` writes a model that another run can start from"
    else:
        why = f"was moved: its plan was made for {original}"
        fix = f"move it back, or `ln -s {run_dir} {original}`"
    return [Violation("RUN", str(run_dir), why, fix)]


def _same_directory(one: Path, other: Path) -> bool:
    try:
        if files.retrying(one, lambda: one.samefile(other)):
            return True
        # A file system that is mounted twice has two device numbers, so samefile() says no. A file that is written
        # through one path is visible through the other.
        probe = one / f".same.{new_token()}"
        files.write_atomic(probe, "")
        try:
            return files.exists(other / probe.name)
        finally:
            files.unlink(probe)
    except OSError:
        return False
