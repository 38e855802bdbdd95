"""Records that are written once per run or attempt: versions, submission, start and end."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.records.reading import find_record

# Name of the metric of `first_step_metrics`.
FIRST_STEP = "throughput/first_step_seconds"
# In the directory of an attempt.
START_FILE = "start/record.json"


class TakenOverError(OSError):
    """A newer attempt owns the run, so the old attempt must not write anything more."""


def newest_attempt(run_dir: Path) -> int:
    """Return the highest number in `attempts/`; 0 if there is none or the directory cannot be listed."""
    try:
        names = [path.name for path in files.listing(run_dir / "attempts")]
        return max((int(name) for name in names if name.isdecimal()), default=0)
    except OSError:  # an outage of the file system must not end the attempt that owns the run
        return 0


def require_newest(run_dir: Path, attempt: int) -> None:
    """Raise TakenOverError if a newer attempt than this one exists."""
    if (newest := newest_attempt(run_dir)) > attempt:
        raise TakenOverError(f"attempt {newest} has taken over the run from attempt {attempt}")


def pickled_agent(folder: Path, submission: str) -> Path:
    """Return the path of the pickle that jobs of a submission load. `folder` is `submitit` in the run directory."""
    return folder / f"{submission}.pkl"


class LockRecord(msgspec.Struct, frozen=True):
    """`lock.json`: identity of the run, and versions of its software."""

    run_id: str = ""
    created_at: float = 0.0  # Unix seconds
    recipe_hash: str = ""  # blake2b-128 of recipe.resolved.json, hexadecimal
    plan_hash: str = ""  # the same of the first attempt's Plan
    python: str = ""
    packages: dict[str, str | None] = {}
    git: str | None = None  # `git describe` of the checkout


class JobRecord(msgspec.Struct, frozen=True):
    """`job.json`: the submitted job. Written before the submission, and again once the job has its id."""

    job_id: str  # empty until sbatch has answered or the job has started
    executor: str  # slurm or local
    submitted_at: float
    slurm_conf: str | None = None
    submission: str = ""  # unique word of the submission; only a job with this word may use the attempt
    host: str = ""  # host that submits the job, or runs a local one
    pid: int = 0  # submitting process on that host; 0 if it stopped without an answer


class StartRecord(msgspec.Struct, frozen=True):
    """`start/record.json`: the job start that uses the attempt. Every requeue of a job is another start."""

    word: str  # unique word of the start, made by its batch script
    job_id: str
    host: str
    time: float  # Unix seconds


def first_step_metrics(attempt_dir: Path) -> dict[str, float]:
    """Return the seconds from the start of the job to now, when its first step is done; nothing if it is unknown."""
    start = find_record(attempt_dir / START_FILE, StartRecord)
    if start is None:
        return {}
    return {FIRST_STEP: max(0.0, time.time() - start.time)}


class Obstacle(msgspec.Struct, frozen=True):
    """Reason why a pending job does not start."""

    component: str  # names of the job's components, comma-separated; empty if it has one component
    reason: str  # Slurm's reason code
    text: str  # what the reason means
    fix: str
    never: bool = True  # the job stays pending until somebody acts

    @property
    def how(self) -> str:
        return f"{'cannot' if self.never else 'does not'} start: {self.text} ({self.reason})"


class EndRecord(msgspec.Struct, frozen=True):
    """`end.json`: how an attempt ended."""

    outcome: str
    reason: str
    suspect: str
    committed_step: int | None
    requeued: bool
    why_not_requeued: str
    time: float
    # Error of an attempt that made no progress, without node names. Empty if it made progress, or if the error may be
    # absent in the next attempt.
    error: str = msgspec.field(name="start_error", default="")
