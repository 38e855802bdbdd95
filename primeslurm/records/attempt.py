"""What is written once a run or an attempt: what it was made from, what was submitted, how it ended."""

from __future__ import annotations

import msgspec


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
    """`job.json`: what was submitted."""

    job_id: str
    executor: str
    """slurm or local."""
    submitted_at: float
    slurm_conf: str | None = None


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
    start_error: str = ""
    """With which engines ended before any of their role was ready; empty if the attempt ended for another reason."""
