"""A last checkpoint before the job's time limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.node.head.job_end import must_stop_before_warning, seconds_left, seconds_to_stop
from primeslurm.plan.model import Plan
from primeslurm.records.journal import Journal
from primeslurm.records.reading import read_record
from primeslurm.records.state import TrainerState
from primeslurm.trainer.base.phase_timer import PhaseTimer
from tests.support.plans import plan_of


@pytest.mark.parametrize(
    ("now", "signal_s", "stop_s", "expected"),
    [
        (9000.0, 120, 100, False),  # Slurm's warning will do, and comes by itself
        (9999.0, 120, 100, False),
        (9000.0, 120, 700, False),  # too early
        (9299.0, 120, 700, False),
        (9300.0, 120, 700, True),
        (9300.0, 120, 0, False),  # nothing is known of checkpoints yet
    ],
)
def test_it_is_time_to_stop(now: float, signal_s: float, stop_s: float, expected: bool) -> None:
    assert must_stop_before_warning(now, 10000.0, signal_s, stop_s) is expected


@pytest.mark.parametrize(
    ("took", "expected"),
    [
        (None, 0.0),
        ({"forward_backward": 100.0}, 0.0),
        ({"forward_backward": 100.0, "wait": 1000.0, "checkpoint": 300.0}, 630.0),
    ],
)
def test_what_a_trainer_still_does(took: dict[str, float] | None, expected: float) -> None:
    assert seconds_to_stop(None if took is None else TrainerState(last_seconds=took)) == expected


def test_the_trainer_records_what_its_checkpoint_took(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "trainer-rank-0")
    timer = PhaseTimer(journal, record=True)
    with timer.phase("checkpoint"):
        pass
    with timer.phase("wait"):
        pass
    assert seconds_to_stop(read_record(tmp_path / "state" / "trainer-rank-0.json", TrainerState)) >= 30.0


def in_slurm() -> Plan:
    return plan_of(Path("/runs/x"), ()).model_copy(update={"executor": "slurm"})


def test_the_end_of_a_job() -> None:
    plan = in_slurm()
    assert seconds_left(plan, {}, 1000.0) == 600.0
    assert seconds_left(plan, {"SLURM_JOB_END_TIME": "5000"}, 1000.0) == 4000.0


@pytest.mark.parametrize(("end", "left_s"), [("5000", 600.0), ("1200", 200.0), ("900", 600.0)])
def test_a_run_without_slurm_ends_with_the_allocation_that_it_was_started_in(end: str, left_s: float) -> None:
    assert seconds_left(plan_of(Path("/runs/x"), ()), {"SLURM_JOB_END_TIME": end}, 1000.0) == left_s


@pytest.mark.parametrize(("wall", "left_s"), [(1400.0, 200.0), (900.0, 600.0), (-1000.0, 600.0), (3000.0, 600.0)])
def test_a_node_whose_clock_is_wrong_goes_by_the_length_of_the_job(wall: float, left_s: float) -> None:
    """Slurm's end of the job is by its controller's clock. A time that cannot be left is a wrong clock."""
    plan = in_slurm()
    environ = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600"}
    assert seconds_left(plan, environ, wall) == left_s
