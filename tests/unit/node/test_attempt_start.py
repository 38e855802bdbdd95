"""The attempt that a start of a job uses, and jobs that do not own the run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from primeslurm.base.errors import RunError
from primeslurm.base.files import write_json
from primeslurm.node.attempt import attempt_start, batch_epilogue
from primeslurm.node.attempt.attempt_start import enter
from primeslurm.node.entry import AgentTask
from primeslurm.records.attempt import EndRecord, JobRecord, StartRecord
from primeslurm.records.fleet import Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.run.attempt_claims import NotOwnerError, claim_attempt
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.launch_failures import START
from tests.support.plans import plan_of

SUBMITTED = JobRecord("", "slurm", 1.0, None, "ours", "login1", 7)
FIRST, SECOND = StartRecord("s1", "5", "n1", 1.0), StartRecord("s2", "5", "n1", 2.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose submission was interrupted before sbatch answered."""
    run = RunDirectory(tmp_path / "run")
    run.attempt(1).prepare(plan_of(run.path, ()))
    run.attempt(1).record_job(SUBMITTED)
    return run


def test_every_start_of_a_job_has_an_attempt_of_its_own(run: RunDirectory) -> None:
    assert enter(run, "ours", FIRST, wait_s=0.0).number == 1
    assert enter(run, "ours", FIRST, wait_s=0.0).number == 1, "the same start again, without the lost nodes"
    write_json(run.attempt(1).fleet_file, {"time": 1.0})
    second = enter(run, "ours", SECOND, wait_s=0.0)
    assert second.number == 2 and second.plan() == run.attempt(1).plan()
    assert not second.fleet_file.exists(), "the orders of the start before are removed"
    assert second.start() == SECOND


def test_the_inherited_restart_count_does_not_number_attempts(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    for start, count in ((FIRST, "3"), (SECOND, "1"), (StartRecord("s3", "5", "n1", 3.0), "2")):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        numbers.append(enter(run, "ours", start, wait_s=0.0).number)
    assert numbers == [1, 2, 3]


def test_a_job_records_its_id_if_the_submitter_could_not(run: RunDirectory) -> None:
    attempt = enter(run, "ours", FIRST, wait_s=0.0)
    assert attempt.job() == msgspec.structs.replace(SUBMITTED, job_id="5")


@pytest.mark.parametrize(
    ("submission", "job_id"),
    [
        pytest.param("theirs", "5", id="a job of another submission"),
        pytest.param("ours", "6", id="a second job of the same submission"),
    ],
)
def test_a_job_that_does_not_own_the_run_learns_its_owner(submission: str, job_id: str, run: RunDirectory) -> None:
    enter(run, "ours", FIRST, wait_s=0.0)
    before = sorted(run.path.rglob("*"))
    stranger = StartRecord("s9", job_id, "n2", 3.0)
    for wait_s in (0.0, 60.0):  # the head, and another agent
        with pytest.raises(NotOwnerError, match=rf"belongs to slurm job 5 .*login1.*; job {job_id} ends without"):
            enter(run, submission, stranger, wait_s=wait_s)
    assert sorted(run.path.rglob("*")) == before


def test_a_requeued_job_that_was_taken_over_ends(run: RunDirectory) -> None:
    enter(run, "ours", FIRST, wait_s=0.0)
    theirs = JobRecord("9", "slurm", 2.0, None, "theirs", "login2")
    assert claim_attempt(run, 2, run.attempt(1).plan(), theirs) is not None
    with pytest.raises(NotOwnerError, match=r"slurm job 9 \(attempt 2, submitted from login2"):
        enter(run, "ours", SECOND, wait_s=0.0)


def test_other_agents_wait_for_the_head_and_claim_the_attempt_without_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(attempt_start, "time", clock)
    assert enter(run, "ours", FIRST, wait_s=120.0).number == 1
    assert 120.0 <= clock.now < 121.0
    assert run.attempt(1).start() == FIRST


def test_an_attempt_may_become_visible_late(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.after = {5.0: lambda: claim_attempt(run, 2, run.attempt(1).plan(), SUBMITTED)}
    monkeypatch.setattr(attempt_start, "time", clock)
    assert enter(run, "ours", FIRST, first=2, wait_s=0.0, visible_s=120.0).number == 2
    with pytest.raises(RunError, match="has no attempt 3"):
        enter(run, "ours", SECOND, first=3, wait_s=0.0, visible_s=120.0)


class Clock:
    """A clock that only sleeping moves. `after` has actions by time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.after: dict[float, object] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.after if at <= self.now]:
            self.after.pop(at)()  # type: ignore[operator]


def test_an_agent_of_a_job_that_does_not_own_the_run_writes_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(run, "ours", FIRST, wait_s=0.0)
    before = sorted(run.path.rglob("*"))
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    monkeypatch.setenv(START, "s9")
    with pytest.raises(SystemExit) as left:
        AgentTask(str(run.path), 1, "theirs")._attempt(run, 0)
    assert left.value.code == 4
    assert "belongs to slurm job 5" in capsys.readouterr().err
    assert sorted(run.path.rglob("*")) == before


def test_the_epilogue_of_a_job_that_does_not_own_the_run_ends_no_attempt(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(run, "ours", FIRST, wait_s=0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    monkeypatch.setenv(START, "s9")
    assert batch_epilogue.main(str(run.path), "theirs", "4", "srun") == 4
    assert "belongs to slurm job 5" in capsys.readouterr().err
    assert run.attempt(1).end() is None and [attempt.number for attempt in run.attempts()] == [1]


def test_an_attempt_that_was_taken_over_is_not_requeued(run: RunDirectory) -> None:
    from primeslurm.node.attempt.attempt_end import conclude

    attempt = enter(run, "ours", FIRST, wait_s=0.0)
    theirs = JobRecord("9", "slurm", 2.0, None, "theirs", "login2")
    assert claim_attempt(run, 2, attempt.plan(), theirs) is not None
    ending = Ending(Outcome.FAILED, "a node was lost", "n1")
    assert not conclude(attempt.plan(), run, attempt, ending, Journal(attempt.path, "head"))
    assert isinstance(end := attempt.end(), EndRecord)
    assert end.why_not_requeued == "attempt 2 has taken over the run"
    assert run.attempt(2).end() is None
