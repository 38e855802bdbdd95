"""Why Slurm ends a job, and how long trainers have for a last checkpoint."""

from __future__ import annotations

import dataclasses
import time

import pytest

from primeslurm.node.head.job_end import Termination, grace_time, termination
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.slurm.client import JobState, parse_job

NOW = 1_795_857_897.0
KILL_WAIT_S = 30.0
RUNNING = JobState("7", "RUNNING", "", 2, "", None, (), "scontrol", ends_at=NOW + 3600)


def job(**changes: object) -> JobState:
    return dataclasses.replace(RUNNING, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "outcome", "left_s", "requeued"),
    [
        (None, "cancelled", 30, False),
        (job(state="COMPLETING"), "cancelled", 30, False),
        (job(state="CANCELLED"), "cancelled", 30, False),
        (job(), "cancelled", 30, False),  # scancel --signal=TERM
        (job(preempted_at=NOW - 1, ends_at=NOW + 120), "preempted", 120, False),
        (job(preempted_at=NOW - 1, ends_at=NOW + 5), "preempted", 30, False),  # KillWait follows a short grace time
        (job(preempted_at=NOW - 60, ends_at=NOW - 1), "preempted", 30, False),
        (job(preempted_at=NOW - 1, ends_at=NOW - 1, state="COMPLETING"), "preempted", 30, False),  # PreemptMode=CANCEL
        (job(preempted_at=NOW - 9, ends_at=NOW - 1, state="COMPLETING"), "cancelled", 30, False),  # and then scancel
        (job(state="COMPLETING", restarts=3), "preempted", 30, True),
        (job(state="PENDING", reason="BeginTime", restarts=3), "preempted", 30, True),
        (job(state="COMPLETING", reason="job_requeued_in_held_state", restarts=3), "preempted", 30, True),
        (job(state="COMPLETING", reason="TimeLimit"), "preempted", 30, False),
        (job(state="TIMEOUT"), "preempted", 30, False),
    ],
)
def test_the_state_of_the_job_tells_why_it_ends(
    found: JobState | None, outcome: str, left_s: float, requeued: bool
) -> None:
    why = termination(found, 2, KILL_WAIT_S, NOW)
    assert (why.ending.outcome, why.left_s, why.requeued_by_slurm) == (outcome, left_s, requeued)


def test_a_preemption_names_the_end_of_its_grace_time() -> None:
    found = grace_time(job(preempted_at=NOW, ends_at=NOW + 40), KILL_WAIT_S, NOW)
    assert found is not None
    until = time.strftime("%H:%M:%S", time.localtime(NOW + 40))
    assert found.ending == Ending(Outcome.PREEMPTED, f"preempted: Slurm gives the job until {until}")
    assert grace_time(job(), KILL_WAIT_S, NOW) is None, "a warning of the time limit is no preemption"


@pytest.mark.parametrize(("left_s", "checkpoint_s"), [(30, 20), (120, 110), (10, 5), (0, 0)])
def test_processes_keep_time_to_end(left_s: float, checkpoint_s: float) -> None:
    assert Termination(Ending(Outcome.CANCELLED, ""), left_s).checkpoint_s == checkpoint_s


def test_slurm_tells_when_a_job_is_preempted_and_ends() -> None:
    words = "JobId=7 JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 StartTime=2026-11-28T09:24:39 Partition=gpu"
    told = parse_job(f"{words} EndTime=2026-11-28T09:25:37 PreemptTime=2026-11-28T09:24:57\n")
    assert told.preempted_at is not None and told.ends_at is not None
    assert time.strftime("%H:%M:%S", time.localtime(told.preempted_at)) == "09:24:57"
    assert told.ends_at - told.preempted_at == 40
    untold = parse_job(f"{words} EndTime=Unknown PreemptTime=None\n")
    assert (untold.preempted_at, untold.ends_at) == (None, None)
