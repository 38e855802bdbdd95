"""The end of an attempt, and the decision about another one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from primeslurm.base.errors import ClusterError
from primeslurm.base.files import write_json
from primeslurm.node.attempt import attempt_end, controller_commands
from primeslurm.node.attempt.attempt_end import conclude
from primeslurm.records.events.training import StepTrained
from primeslurm.records.fleet import AgentReport, Ending, Outcome
from primeslurm.records.journal import Journal
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.client import JobComponent, JobState
from primeslurm.wire.stored import checkpoints
from tests.support.plans import plan_of


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "r")


def commit(run: RunDirectory, step: int) -> None:
    checkpoints.step_dir(run.path, step).mkdir(parents=True)
    checkpoints.commit(checkpoints.step_dir(run.path, step), step, 1)


def prepared(run: RunDirectory, number: int) -> Attempt:
    attempt = run.attempt(number)
    attempt.prepare(plan_of(run.path, (), max_attempts=9))
    return attempt


def requeues(run: RunDirectory, attempt: Attempt, ending: Ending) -> bool:
    return conclude(attempt.plan(), run, attempt, ending, Journal(attempt.path, "head"))


def test_a_run_ends_after_three_attempts_without_a_new_step(run: RunDirectory) -> None:
    commit(run, 38)  # by the first attempt
    ending = Ending(Outcome.FAILED, "a trainer rank was killed", "trainer-rank-0")
    assert [requeues(run, prepared(run, number), ending) for number in range(1, 5)] == [True, True, True, False]
    assert (last := run.latest().end()) is not None
    assert last.why_not_requeued == "three failed attempts in a row committed nothing new"


MISSING = "2026-11-28 09:00:01 trainer 0 ERROR ValueError: missing: model.embed_tokens.weight in /m/1.safetensors"
NAMED = "ValueError: node {} with 127.0.0.{} does not know tensor at 0x7f5b479cc1{}0"


@pytest.mark.parametrize(
    ("errors", "trained", "requeued"),
    [
        pytest.param((MISSING, MISSING), (), [True, False], id="the same"),
        pytest.param((MISSING, MISSING.replace("01 trainer 0", "59 trainer 3")), (), [True, False], id="time and rank"),
        pytest.param(
            (NAMED.format("alpha", 1, "a"), NAMED.format("beta", 2, "b")), (), [True, False], id="node, address"
        ),
        pytest.param((f"{MISSING[:90]}...", MISSING), (), [True, False], id="cut"),
        pytest.param((MISSING, "KeyError: 'x'", MISSING), (), [True, True, False], id="another"),
        pytest.param((MISSING, MISSING, MISSING), (1, 2, 3), [True, True, False], id="after progress"),
        pytest.param((MISSING, MISSING, MISSING), (1,), [True, True, False], id="the second time without progress"),
        pytest.param(("ConnectionError: Connection refused",) * 3, (), [True, True, False], id="may pass"),
        pytest.param(("",) * 3, (), [True, True, False], id="no message"),
        pytest.param((MISSING, None, MISSING), (), [True, True, False], id="a preemption between them"),
    ],
)
def test_an_error_that_repeats_before_any_progress_ends_the_run_after_the_second(
    errors: tuple[str | None, ...], trained: tuple[int, ...], requeued: list[bool], run: RunDirectory
) -> None:
    found = []
    for number, error in enumerate(errors, start=1):
        attempt = prepared(run, number)
        for name in ("alpha", "beta"):
            report = AgentReport(0, name, "", 1.0, agent_pid=1)
            write_json(attempt.agent_file(("alpha", "beta").index(name)), msgspec.to_builtins(report))
        if number in trained:
            Journal(attempt.path, "trainer-rank-0").write(StepTrained(1))
        ending = Ending(Outcome.PREEMPTED, "USR2")
        if error is not None:
            ending = Ending(Outcome.FAILED, f"trainer-rank-0 ended with ({error})", "trainer-rank-0", error=error)
        found.append(requeues(run, attempt, ending))
    assert found == requeued
    last = run.latest().end()
    assert last is not None
    if len(errors) == 2:
        assert last.why_not_requeued == "the attempt before ended with the same error, and neither made progress"


def test_an_error_that_repeats_after_a_commit_does_not_end_the_run(run: RunDirectory) -> None:
    ending = Ending(Outcome.FAILED, "engine-0 cannot start", "engine-0", error=MISSING)
    assert requeues(run, prepared(run, 1), ending)
    commit(run, 5)
    assert requeues(run, prepared(run, 2), ending)


class ForgetfulSlurm:
    """A fake controller that has requeued one component of a job, and requeues the others on request."""

    def __init__(self, others: str, restarts: int, *, obeys: bool = True) -> None:
        self.others, self.restarts, self.obeys = others, restarts, obeys
        self.leader, self.requeued = "COMPLETING" if restarts else "CANCELLED", 0

    def ping(self) -> bool:
        return True

    def job(self, job_id: str) -> JobState:
        states = (self.leader, self.others)
        components = tuple(JobComponent(job_id, i, "gpu", state, "") for i, state in enumerate(states))
        return JobState(job_id, self.leader, "", self.restarts, "", None, components, "scontrol", size=2)

    def requeue(self, job_id: str) -> None:
        self.requeued += 1
        if self.obeys:
            self.others = "PENDING"
        raise ClusterError(f"Job is pending execution for job {job_id}")


@pytest.mark.parametrize(
    ("slurm", "requeued", "avoids"),
    [
        pytest.param(ForgetfulSlurm("CANCELLED", 0), 0, False, id="cancelled"),
        pytest.param(ForgetfulSlurm("PENDING", 1), 0, True, id="requeued whole"),
        pytest.param(ForgetfulSlurm("FAILED", 1), 1, True, id="requeued in part"),
    ],
)
def test_a_job_that_slurm_requeues_in_part_is_requeued_as_a_whole(
    slurm: ForgetfulSlurm, requeued: int, avoids: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(attempt_end, "SlurmClient", lambda: slurm)
    monkeypatch.setattr(attempt_end, "exclude_bad_nodes", lambda plan, job_id: told.append(job_id))
    monkeypatch.setattr(controller_commands, "SAVED_S", 0.0)
    attempt_end.complete_requeue(plan_of(tmp_path / "run", ()), "7", 0)
    assert (slurm.requeued, told) == (requeued, ["7"] * avoids)


def test_a_job_that_stays_requeued_in_part_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = ForgetfulSlurm("FAILED", 1, obeys=False)
    monkeypatch.setattr(attempt_end, "SlurmClient", lambda: slurm)
    monkeypatch.setattr(attempt_end, "REQUEUE_S", 0.0)
    attempt_end.complete_requeue(plan_of(tmp_path / "run", ()), "7", 0)
    assert capsys.readouterr().err == "job 7 may not start again: Slurm has requeued one component of job 7 alone\n"
