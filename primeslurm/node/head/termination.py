"""Why an attempt is told to stop, and how long it has left until it is killed.

Slurm sends the same SIGTERM for a preemption with a grace time, a requeue, an unannounced time limit and `scancel`. The
state of the job tells them apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from primeslurm.base.errors import ClusterError
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.run.directory import BY_SIGTERM
from primeslurm.slurm.client import KILL_WAIT_S, JobState, SlurmClient
from primeslurm.wire.transport.retry import retry_in_thread

SLURM_ANSWER_S = 5.0
"""Longest wait for Slurm to say why it ends the job: that time is missing for the last checkpoint. [s]"""
WIND_DOWN_S = 10.0
"""Time before the kill that is left for processes and agents to end and for the head to record the end. [s]"""


@dataclass(frozen=True)
class Termination:
    """A request to stop from outside."""

    ending: Ending
    left_s: float
    """Seconds until the job's processes are killed."""
    requeued_by_slurm: bool = False
    """Slurm starts the job again without being asked to."""
    known: bool = True
    """Slurm has said why."""

    @property
    def checkpoint_s(self) -> float:
        """Seconds that trainers have for a last checkpoint."""
        return max(self.left_s - WIND_DOWN_S, self.left_s / 2)


def termination(job: JobState | None, restarts: int, kill_wait_s: float, wall_time: float) -> Termination:
    """Tell why Slurm has sent SIGTERM. Pure.

    Args:
        job: as the controller describes it after the signal; None if it cannot be asked.
        restarts: how often Slurm had requeued the job when the attempt began.
        kill_wait_s: Slurm's KillWait.
        wall_time: the time in Unix seconds, to compare with Slurm's times.
    """
    cancelled = Termination(Ending(Outcome.CANCELLED, BY_SIGTERM), kill_wait_s, known=job is not None)
    if job is None:
        return cancelled
    if job.restarts > restarts:
        return Termination(Ending(Outcome.PREEMPTED, "Slurm requeued the job"), kill_wait_s, requeued_by_slurm=True)
    if preemption := grace_time(job, kill_wait_s, wall_time):
        return preemption
    # PreemptMode=CANCEL ends the job at the time of its preemption, scancel within the grace time ends it later. A job
    # that is completing can still be requeued.
    if job.state != "RUNNING" and job.preempted_at is not None and job.ends_at == job.preempted_at:
        return Termination(Ending(Outcome.PREEMPTED, "preempted: Slurm cancels the job"), kill_wait_s)
    if job.state == "TIMEOUT" or job.reason == "TimeLimit":
        return Termination(Ending(Outcome.PREEMPTED, "time limit: Slurm ended the job without a warning"), kill_wait_s)
    return cancelled


def grace_time(job: JobState | None, kill_wait_s: float, wall_time: float) -> Termination | None:
    """Return the preemption whose grace time runs, if one does. Pure.

    Args:
        job: as the controller describes it; None if it cannot be asked.
        kill_wait_s: Slurm's KillWait, which follows the grace time.
        wall_time: the time in Unix seconds, to compare with Slurm's times.
    """
    if job is None or job.state != "RUNNING" or job.preempted_at is None or job.ends_at is None:
        return None
    left_s = max(job.ends_at - wall_time, kill_wait_s)
    until = time.strftime("%H:%M:%S", time.localtime(job.ends_at))
    return Termination(Ending(Outcome.PREEMPTED, f"preempted: Slurm gives the job until {until}"), left_s)


def ask_slurm(job_id: str) -> tuple[JobState | None, float]:
    """Ask Slurm for the state of a job that it ends, and for its KillWait. Without an answer: None, and the default."""
    client = SlurmClient(timeout_s=SLURM_ANSWER_S / 2)
    # More than one try: SIGTERM may come twice, and then ends the command, too.
    again = retry_in_thread(ClusterError, SLURM_ANSWER_S / 2, pause_s=0.3)
    try:
        return again(lambda: (client.job(job_id), client.kill_wait_s()))
    except ClusterError:
        return None, KILL_WAIT_S
