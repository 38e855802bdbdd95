"""The job's time limit: does a last checkpoint still fit between Slurm's warning and the end? Pure, but for a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from primeslurm.plan.model import Plan
from primeslurm.recipe.fields.slurm_syntax import minutes
from primeslurm.records.state import TrainerState

MARGIN_S = 30.0
"""For signals, the orchestrator's part and Slurm itself."""
CAUTION = 1.5
"""The next checkpoint may take this much longer than the last one."""
_PHASES = ("forward_backward", "optimizer", "publish", "checkpoint")
"""What a trainer that is asked to stop still does: the step it is in, and a checkpoint."""


def boot_clock() -> float:
    """Return seconds since boot. Nobody sets this clock, and it goes on while a virtual machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_left(plan: Plan, environ: Mapping[str, str], wall: float) -> float:
    """Work out how many seconds the job has left, as Slurm says itself, or by the limit that was asked for.

    Args:
        plan: of the job.
        environ: of a process in the job.
        wall: Unix seconds, by this node's clock. Slurm's times are those of its controller: a difference that cannot
            be is a difference between the two clocks.
    """
    limit_s = 60.0 * minutes(plan.job.time)
    end = environ.get("SLURM_JOB_END_TIME")  # since Slurm 23.02
    start = environ.get("SLURM_JOB_START_TIME")
    if not end:
        return limit_s
    left_s = float(end) - wall
    if plan.executor == "local":  # the allocation that the run was started in may end before the run's own limit
        return min(limit_s, left_s) if left_s > 0.0 else limit_s
    longest_s = float(end) - float(start) if start else math.inf  # an administrator may have changed the limit
    return left_s if 0.0 < left_s <= longest_s else min(longest_s, limit_s)


def seconds_to_stop(trainer: TrainerState | None) -> float:
    """Longest time from asking a trainer to stop until it has, judged by the state it records of itself, if any.

    0 while no checkpoint was measured: nothing is known then.
    """
    last = trainer.last_seconds if trainer else {}
    if "checkpoint" not in last:
        return 0.0
    return CAUTION * sum(last.get(phase, 0.0) for phase in _PHASES) + MARGIN_S


def ends_too_late(now: float, end: float, signal_s: float, stop_s: float) -> bool:
    """Whether it is time to stop although Slurm has not warned yet: its warning will leave too little time.

    Args:
        now: seconds since boot.
        end: when Slurm ends the job, by the same clock.
        signal_s: how long before that it warns.
        stop_s: how long stopping with a checkpoint may take.
    """
    return stop_s > signal_s and now >= end - stop_s
