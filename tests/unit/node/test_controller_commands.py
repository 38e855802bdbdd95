"""Commands to a Slurm controller that does not answer, refuses, or forgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primeslurm.base.errors import ClusterError
from primeslurm.node.attempt import controller_commands
from primeslurm.slurm.client import JobState

JOB = JobState("7", "RUNNING", "", 0, "", None, (), "scontrol")


class FlightySlurm:
    """A fake controller that misses some pings, refuses some requeues, and forgets some."""

    def __init__(self, away: int = 0, refusals: int = 0, job: JobState | None = JOB, forgets: int = 0) -> None:
        self.away, self.refusals, self.found, self.forgets, self.requeued = away, refusals, job, forgets, 0

    def ping(self) -> bool:
        self.away -= 1
        return self.away < 0

    def job(self, job_id: str) -> JobState | None:
        return self.found

    def requeue(self, job_id: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ClusterError("requeue is disabled")
        self.requeued += 1
        if self.requeued <= self.forgets:
            self.away = 2
        else:
            self.found = replace(JOB, state="PENDING", restarts=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves."""
    now = [0.0]
    monkeypatch.setattr(controller_commands.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(controller_commands.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def requeue(slurm: FlightySlurm) -> None:
    controller_commands.requeue(slurm, "7", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("slurm", [FlightySlurm(), FlightySlurm(away=900), FlightySlurm(away=3, refusals=2)])
def test_a_job_is_requeued_once_the_controller_answers(slurm: FlightySlurm, capsys: pytest.CaptureFixture[str]) -> None:
    away = slurm.away
    requeue(slurm)
    assert slurm.requeued == 1
    assert capsys.readouterr().err.count("waiting for it") == int(away > 0)


@pytest.mark.parametrize("job", [None, replace(JOB, state="PENDING"), replace(JOB, restarts=1)])
def test_a_requeued_or_ended_job_is_left_alone(job: JobState | None) -> None:
    slurm = FlightySlurm(away=2, job=job)
    requeue(slurm)
    assert slurm.requeued == 0


def test_a_controller_that_has_lost_the_requeue_is_asked_again(clock: list[float]) -> None:
    slurm = FlightySlurm(forgets=2)
    requeue(slurm)
    assert slurm.requeued == 3
    assert clock[0] >= controller_commands.SAVED_S


def test_a_requeued_job_is_polled_until_it_is_saved(clock: list[float]) -> None:
    slurm = FlightySlurm(job=replace(JOB, state="COMPLETING", restarts=1))
    requeue(slurm)
    assert slurm.requeued == 0
    assert controller_commands.SAVED_S <= clock[0] < 2 * controller_commands.SAVED_S


def test_a_refusal_is_raised_soon(clock: list[float]) -> None:
    with pytest.raises(ClusterError, match="requeue is disabled"):
        requeue(FlightySlurm(refusals=99))
    assert clock[0] < 60


def test_a_controller_that_never_answers_is_given_up(clock: list[float]) -> None:
    with pytest.raises(ClusterError, match="has not answered for 60 minutes"):
        requeue(FlightySlurm(away=10_000))
    assert clock[0] > controller_commands.DOWN_S
