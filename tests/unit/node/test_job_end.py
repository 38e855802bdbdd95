"""How Slurm ends a job: the reason, and the time for a last checkpoint."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from primeslurm.node.head.job_end import (
    Termination,
    grace_time,
    must_stop_before_warning,
    seconds_left,
    seconds_to_stop,
    termination,
)
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.records.reading import read_record
from primeslurm.records.state import TrainerState
from primeslurm.slurm.client import JobState, parse_job
from primeslurm.trainer.base.phase_timer import PhaseTimer
from tests.support.plans import plan_of

NOW = 1_795_857_897.0
KILL_WAIT_S = 30.0
RUNNING = JobState("7", "RUNNING", "", 2, "", None, (), "scontrol", ends_at=NOW + 3600)


def job(**changes: object) -> JobState:
    return dataclasses.replace(RUNNING, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "outcome", "left_s", "requeued"),
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
def test_the_state_of_the_job_explains_sigterm(
    state: JobState | None, outcome: str, left_s: float, requeued: bool
) -> None:
    cause = termination(state, 2, KILL_WAIT_S, NOW)
    assert (cause.ending.outcome, cause.left_s, cause.requeued_by_slurm) == (outcome, left_s, requeued)


def test_a_preemption_names_the_end_of_its_grace_time() -> None:
    cause = grace_time(job(preempted_at=NOW, ends_at=NOW + 40), KILL_WAIT_S, NOW)
    assert cause is not None
    until = time.strftime("%H:%M:%S", time.localtime(NOW + 40))
    assert cause.ending == Ending(Outcome.PREEMPTED, f"preempted: Slurm gives the job until {until}")
    assert grace_time(job(), KILL_WAIT_S, NOW) is None, "a warning of the time limit is no preemption"


@pytest.mark.parametrize(("left_s", "checkpoint_s"), [(30, 20), (120, 110), (10, 5), (0, 0)])
def test_checkpoints_leave_time_to_end_processes(left_s: float, checkpoint_s: float) -> None:
    assert Termination(Ending(Outcome.CANCELLED, ""), left_s).checkpoint_s == checkpoint_s


def test_preemption_and_end_are_read_from_slurm() -> None:
    line = "JobId=7 JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 StartTime=2026-11-28T09:24:39 Partition=gpu"
    with_times = parse_job(f"{line} EndTime=2026-11-28T09:25:37 PreemptTime=2026-11-28T09:24:57\n")
    assert with_times.preempted_at is not None and with_times.ends_at is not None
    assert time.strftime("%H:%M:%S", time.localtime(with_times.preempted_at)) == "09:24:57"
    assert with_times.ends_at - with_times.preempted_at == 40
    without_times = parse_job(f"{line} EndTime=Unknown PreemptTime=None\n")
    assert (without_times.preempted_at, without_times.ends_at) == (None, None)


@pytest.mark.parametrize(
    ("now", "signal_s", "stop_s", "expected"),
    [
        (9000.0, 120, 100, False),  # Slurm's own warning is early enough
        (9999.0, 120, 100, False),
        (9000.0, 120, 700, False),  # too early
        (9299.0, 120, 700, False),
        (9300.0, 120, 700, True),
        (9300.0, 120, 0, False),  # there was no checkpoint yet
    ],
)
def test_a_long_checkpoint_stops_the_trainer_before_the_warning(
    now: float, signal_s: float, stop_s: float, expected: bool
) -> None:
    assert must_stop_before_warning(now, 10000.0, signal_s, stop_s) is expected


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        (None, 0.0),
        ({"forward_backward": 100.0}, 0.0),
        ({"forward_backward": 100.0, "wait": 1000.0, "checkpoint": 300.0}, 630.0),
    ],
)
def test_time_to_stop_includes_step_and_checkpoint(took: dict[str, float] | None, expected: float) -> None:
    assert seconds_to_stop(None if took is None else TrainerState(last_seconds=took)) == expected


def test_the_trainer_records_what_its_checkpoint_took(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "trainer-rank-0")
    timer = PhaseTimer(journal, record=True)
    with timer.phase("checkpoint"):
        pass
    with timer.phase("wait"):
        pass
    assert seconds_to_stop(read_record(tmp_path / "state" / "trainer-rank-0.json", TrainerState)) >= 30.0


IN_SLURM = plan_of(Path("/runs/x"), ()).model_copy(update={"executor": "slurm"})


def test_time_left_of_a_job() -> None:
    assert seconds_left(IN_SLURM, {}, 1000.0) == 600.0
    assert seconds_left(IN_SLURM, {"SLURM_JOB_END_TIME": "5000"}, 1000.0) == 4000.0


@pytest.mark.parametrize(("end", "left_s"), [("5000", 600.0), ("1200", 200.0), ("900", 600.0)])
def test_a_local_run_ends_with_its_allocation(end: str, left_s: float) -> None:
    assert seconds_left(plan_of(Path("/runs/x"), ()), {"SLURM_JOB_END_TIME": end}, 1000.0) == left_s


@pytest.mark.parametrize(("wall", "left_s"), [(1400.0, 200.0), (900.0, 600.0), (-1000.0, 600.0), (3000.0, 600.0)])
def test_a_wrong_clock_does_not_shorten_the_job(wall: float, left_s: float) -> None:
    environ = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600"}
    assert seconds_left(IN_SLURM, environ, wall) == left_s
