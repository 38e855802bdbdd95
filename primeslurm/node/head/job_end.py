"""How Slurm ends a job: why it sent SIGTERM, how much time is left, and whether a last checkpoint still fits.

Slurm sends the same SIGTERM for a preemption with a grace time, a requeue, an unannounced time limit and `scancel`. The
state of the job tells them apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from primeslurm.base.errors import ClusterError
from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.types import minutes
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.state import TrainerState
from primeslurm.run.directory import BY_SIGTERM
from primeslurm.slurm.client import KILL_WAIT_S, JobState, SlurmClient
from primeslurm.wire.transport.retry import retry_in_thread

SLURM_ANSWER_S = 5.0  # longest wait for Slurm to say why it ends the job. The last checkpoint loses this time. [s]
WIND_DOWN_S = 10.0  # time before the kill for processes and agents to end, and for the head to record the end. [s]
MARGIN_S = 30.0  # time for signals, the orchestrator's part of the checkpoint, and Slurm itself. [s]
CAUTION = 1.5  # the next checkpoint may take this much longer than the last one
# Work of a trainer after the request to stop: the current step, and a checkpoint.
_PHASES_TO_STOP = ("forward_backward", "optimizer", "publish", "checkpoint")


@dataclass(frozen=True)
class Termination:
    """A request from outside to stop."""

    ending: Ending
    left_s: float  # time until the processes of the job are killed [s]
    requeued_by_slurm: bool = False  # Slurm starts the job again without a request
    known: bool = True  # Slurm has said why

    @property
    def checkpoint_s(self) -> float:
        return max(self.left_s - WIND_DOWN_S, self.left_s / 2)


def termination(job: JobState | None, restarts: int, kill_wait_s: float, wall_time: float) -> Termination:
    """Return why Slurm has sent SIGTERM. Pure.

    `job` is the state after the signal (None without an answer), `restarts` the requeues at the start of the attempt,
    and `kill_wait_s` the time between SIGTERM and SIGKILL.
    """
    cancelled = Termination(Ending(Outcome.CANCELLED, BY_SIGTERM), kill_wait_s, known=job is not None)
    if job is None:
        return cancelled
    if job.restarts > restarts:
        return Termination(Ending(Outcome.PREEMPTED, "Slurm requeued the job"), kill_wait_s, requeued_by_slurm=True)
    if preemption := grace_time(job, kill_wait_s, wall_time):
        return preemption
    # PreemptMode=CANCEL ends the job at the time of its preemption; scancel during the grace time ends it later. A job
    # that is completing can still be requeued.
    if job.state != "RUNNING" and job.preempted_at is not None and job.ends_at == job.preempted_at:
        return Termination(Ending(Outcome.PREEMPTED, "preempted: Slurm cancels the job"), kill_wait_s)
    if job.state == "TIMEOUT" or job.reason == "TimeLimit":
        return Termination(Ending(Outcome.PREEMPTED, "time limit: Slurm ended the job without a warning"), kill_wait_s)
    return cancelled


def grace_time(job: JobState | None, kill_wait_s: float, wall_time: float) -> Termination | None:
    """Return the preemption whose grace time is running; None if there is none. Arguments as for `termination`."""
    if job is None or job.state != "RUNNING" or job.preempted_at is None or job.ends_at is None:
        return None
    left_s = max(job.ends_at - wall_time, kill_wait_s)
    until = time.strftime("%H:%M:%S", time.localtime(job.ends_at))
    return Termination(Ending(Outcome.PREEMPTED, f"preempted: Slurm gives the job until {until}"), left_s)


def ask_slurm(job_id: str) -> tuple[JobState | None, float]:
    """Return the state of a job that Slurm is ending, and Slurm's KillWait. Without an answer: None and the default."""
    client = SlurmClient(timeout_s=SLURM_ANSWER_S / 2)
    # SIGTERM may come twice. The second one also ends Slurm's command, so the command is retried.
    retrying = retry_in_thread(ClusterError, SLURM_ANSWER_S / 2, pause_s=0.3)
    try:
        return retrying(lambda: (client.job(job_id), client.kill_wait_s()))
    except ClusterError:
        return None, KILL_WAIT_S


def boot_clock() -> float:
    """Return seconds since boot. Nobody sets this clock, and it also runs while a virtual machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_left(plan: Plan, environ: Mapping[str, str], wall_time: float) -> float:
    """Return the time until Slurm ends the job [s], or the time limit of the Plan if Slurm has not set it.

    `wall_time` comes from this node's clock, and Slurm's times from the clock of its controller. An impossible
    difference means that the two clocks differ, and is not used.
    """
    limit_s = 60.0 * minutes(plan.job.time)
    end = environ.get("SLURM_JOB_END_TIME")  # since Slurm 23.02
    start = environ.get("SLURM_JOB_START_TIME")
    if not end:
        return limit_s
    left_s = float(end) - wall_time
    if plan.executor == "local":  # the allocation around a local run may end before the run's own limit
        return min(limit_s, left_s) if left_s > 0.0 else limit_s
    longest_s = float(end) - float(start) if start else math.inf  # an administrator may have changed the limit
    return left_s if 0.0 < left_s <= longest_s else min(longest_s, limit_s)


def seconds_to_stop(trainer: TrainerState | None) -> float:
    """Return how long a trainer may take to stop with a checkpoint [s]; 0 before its first checkpoint."""
    last = trainer.last_seconds if trainer else {}
    if "checkpoint" not in last:
        return 0.0
    return CAUTION * sum(last.get(phase, 0.0) for phase in _PHASES_TO_STOP) + MARGIN_S


def must_stop_before_warning(now: float, end: float, signal_s: float, stop_s: float) -> bool:
    """Return whether the trainer must stop now, because Slurm's warning will come too late.

    `now` and `end` are boot clock [s]. Slurm warns `signal_s` before the end, and stopping takes `stop_s`.
    """
    return stop_s > signal_s and now >= end - stop_s
