"""What is written once a run or an attempt: what it was made from, what was submitted, how it ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from primeslurm.base import files


class TakenOverError(OSError):
    """A newer attempt owns the run. Nothing of the run may be written for the old attempt any more."""


def newest_attempt(run_dir: Path) -> int:
    """Return the highest number in `attempts/`; 0 if there is none, or the directory cannot be listed."""
    try:
        names = [path.name for path in files.listing(run_dir / "attempts")]
        return max((int(name) for name in names if name.isdecimal()), default=0)
    except OSError:  # an owner is not stopped because the file system is away
        return 0


def require_newest(run_dir: Path, attempt: int) -> None:
    """Raise TakenOverError if a newer attempt than this one exists."""
    if (newest := newest_attempt(run_dir)) > attempt:
        raise TakenOverError(f"attempt {newest} has taken over the run from attempt {attempt}")


def pickled_agent(folder: Path, submission: str) -> Path:
    """Return the path of the pickle that a job loads when it starts for the first time.

    Args:
        folder: `submitit` of the run directory.
        submission: that the job is made for.
    """
    return folder / f"{submission}.pkl"


class LockRecord(msgspec.Struct, frozen=True):
    """`lock.json`: which run this is, and what it was made with."""

    run_id: str = ""
    created_at: float = 0.0
    """Unix seconds."""
    recipe_hash: str = ""
    """blake2b-128 of recipe.resolved.json, in hex."""
    plan_hash: str = ""
    """The same of the first attempt's Plan."""
    python: str = ""
    packages: dict[str, str | None] = {}
    git: str | None = None
    """`git describe` of the checkout."""


class JobRecord(msgspec.Struct, frozen=True):
    """`job.json`: what was submitted. It is written before the job is submitted, and again when the job has its id."""

    job_id: str
    """Empty until sbatch has answered, or the job has started."""
    executor: str
    """slurm or local."""
    submitted_at: float
    slurm_conf: str | None = None
    submission: str = ""
    """Unique word that the job is submitted with. Only a job with this word may use the attempt."""
    host: str = ""
    """Host that submits, or keeps a local run."""
    pid: int = 0
    """Process on this host that submits; 0 if it has given up without an answer."""


class StartRecord(msgspec.Struct, frozen=True):
    """`start/record.json`: the start of a job that uses the attempt. Every requeue of a job is another start."""

    word: str
    """Unique word of the start, made by its batch script."""
    job_id: str
    host: str
    time: float
    """Unix seconds."""


class Obstacle(msgspec.Struct, frozen=True):
    """Why a waiting job does not start by waiting alone."""

    component: str
    """Names of the job's components, with commas; empty if it has one."""
    reason: str
    """Slurm's word."""
    text: str
    """What it means."""
    fix: str
    never: bool = True
    """Whether it lasts until somebody acts."""

    @property
    def how(self) -> str:
        """Say that the component does not start, and why."""
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
    error: str = msgspec.field(name="start_error", default="")
    """Message that the attempt ended with before it had made progress, without names of nodes. Empty if it had made
    progress, or if another attempt may be free of the error."""
