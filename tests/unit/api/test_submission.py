"""Submissions that are interrupted, or whose answer is lost: the job is found, and there is never a second one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import primeslurm
from primeslurm.api import submission
from primeslurm.api.runs.run import Run
from primeslurm.base.errors import ClusterError, UsageError
from primeslurm.base.files import write_json
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.attempt_claims import claim_attempt
from primeslurm.run.directory import RunDirectory, name_in_use
from tests.support.fake_slurm import FakeSlurm
from tests.support.slurm_plans import group, plan

ROOT = str(Path(__file__).resolve().parents[3])
RESUME = "import sys; from primeslurm.api.runs.run import find_run; print(find_run(sys.argv[1]).start_again().job_id)"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(fake.bin), prepend=os.pathsep)
    monkeypatch.setattr(submission, "LATE_JOB_S", 0.0)
    return fake


@pytest.fixture
def run(tmp_path: Path, slurm: FakeSlurm) -> Run:
    """A run whose only attempt has failed."""
    directory = RunDirectory(tmp_path / "runs" / "r")
    attempt = directory.attempt(1)
    attempt.prepare(plan(directory.path, group(0, "all")))
    attempt.record_job(JobRecord("999", "slurm", 1.0, submission="first", host="login1"))
    attempt.record_end(EndRecord("failed", "a node was lost", "", None, False, "", 2.0))
    write_json(directory.path / "lock.json", {"run_id": "r-1", "created_at": 1.0})
    return Run(directory.path)


@pytest.fixture
def resume(run: Run) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start `resume` as a process of its own, in a session of its own, as a terminal has."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", RESUME, str(run.path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        env = {**os.environ, "PYTHONPATH": ROOT}
        started.append(subprocess.Popen(argv, env=env, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_job_is_submitted_with_a_word_that_is_on_record_before(run: Run, slurm: FakeSlurm) -> None:
    submitted = run.start_again()
    job = run.directory.attempt(2).job()
    assert job is not None and submitted.job_id == job.job_id == "1"
    path = run.path / "attempts/2/job.sbatch"
    assert slurm.words("1") == f"--comment=primeslurm {job.submission} {path} {job.submission}\n"
    assert run.status().phase == "pending" and run.status().job_id == "1"


def test_a_recipes_own_comment_stays(run: Run, slurm: FakeSlurm) -> None:
    run.directory.attempt(1).prepare(plan(run.path, group(0, "all"), comment="project x"))
    run.start_again()
    assert "--comment" not in slurm.words("1")
    assert '--comment="project x"' in (run.path / "attempts/2/job.sbatch").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_until_the_job_is_on_record(
    number: signal.Signals, run: Run, slurm: FakeSlurm, resume: Callable[[], subprocess.Popen[str]]
) -> None:
    slurm.set("hold")
    process = resume()
    until(lambda: slurm.jobs)
    os.killpg(process.pid, number)  # a terminal sends it to all of its processes, sbatch among them
    assert process.stderr is not None
    until(lambda: "is delayed until" in process.stderr.readline())  # type: ignore[union-attr]
    slurm.unset("hold")
    _, err = process.communicate(timeout=120)
    assert process.returncode == -number or (number == signal.SIGINT and "KeyboardInterrupt" in err)
    assert f"submitted demo as slurm job 1; `primeslurm cancel {run.path}` ends it" in err
    assert (status := run.status()).job_id == "1" and status.phase == "pending"
    assert slurm.jobs == {"1": "PENDING"}


@pytest.fixture
def orphan(run: Run, slurm: FakeSlurm, resume: Callable[[], subprocess.Popen[str]]) -> str:
    """The id of a job whose submitter was killed before sbatch had answered."""
    slurm.set("hold")
    process = resume()
    until(lambda: slurm.jobs)
    process.kill()
    process.communicate()
    slurm.unset("hold")
    job = run.directory.attempt(2).job()
    assert job is not None and job.job_id == ""
    return "1"


def test_status_finds_the_job_of_a_submission_that_was_killed(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    status = run.status()
    assert (status.phase, status.job_id, status.reason) == ("pending", orphan, "PENDING")
    slurm.set("down")
    assert (job := run.directory.attempt(2).job()) is not None and job.job_id == orphan, "it is on record"


def test_cancel_finds_it(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    assert run.cancel()
    assert slurm.jobs == {orphan: "CANCELLED"}


def test_resume_finds_it_and_makes_no_second_one(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    with pytest.raises(UsageError, match=rf"is pending: there is nothing to resume, slurm job {orphan} \(attempt 2"):
        run.start_again()
    assert slurm.jobs == {orphan: "PENDING"}


def test_a_submission_that_was_killed_before_slurm_had_the_job_is_told_and_resumed(run: Run, slurm: FakeSlurm) -> None:
    intent = JobRecord("", "slurm", time.time(), None, "gone", "", 0)
    assert claim_attempt(run.directory, 2, run.plan(), intent) is not None
    status = run.status()
    assert (status.phase, status.job_id) == ("lost", None)
    assert status.reason.startswith("the submission was interrupted before Slurm had the job")
    assert run.start_again().attempt == 3 and slurm.jobs == {"1": "PENDING"}


def test_nobody_resumes_while_slurm_cannot_say_whether_there_is_a_job(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    slurm.set("down")
    with pytest.raises(ClusterError, match="Unable to contact"):
        run.start_again()
    silences: list[ClusterError] = []
    assert run.status(if_silent=silences.append).phase == "silent" and silences
    assert slurm.jobs == {orphan: "PENDING"}


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "",
    ],
)
def test_a_job_that_slurm_has_taken_is_found_whatever_sbatch_says(said: str, run: Run, slurm: FakeSlurm) -> None:
    slurm.set("lost", said)
    assert run.start_again().job_id == "1"
    assert run.status().phase == "pending" and slurm.jobs == {"1": "PENDING"}


@pytest.mark.parametrize("said", ["Invalid account", "Socket timed out on send/recv operation"])
def test_a_job_that_slurm_has_not_leaves_nothing(said: str, run: Run, slurm: FakeSlurm) -> None:
    slurm.set("refuse", f"sbatch: error: {said}")
    with pytest.raises(ClusterError, match=said):
        run.start_again()
    assert [path.name for path in (run.path / "attempts").iterdir()] == ["1"] and slurm.jobs == {}


def test_cancelled_components_of_a_refused_job_are_no_job(run: Run, slurm: FakeSlurm) -> None:
    said = "Batch job submission failed: Job violates accounting/QOS policy"
    slurm.set("broken", f"sbatch: error: {said}")
    with pytest.raises(ClusterError, match=said):
        run.start_again()
    assert [path.name for path in (run.path / "attempts").iterdir()] == ["1"]
    assert slurm.jobs == {"1": "CANCELLED"} and run.status().phase == "failed"
    slurm.unset("broken")
    assert run.start_again().job_id == "2"


def test_an_attempt_stays_as_long_as_nobody_knows_whether_there_is_a_job(run: Run, slurm: FakeSlurm) -> None:
    slurm.set("lost", "sbatch: error: Socket timed out on send/recv operation")
    slurm.set("down")
    with pytest.raises(ClusterError, match="it is unknown whether Slurm has the job"):
        run.start_again()
    slurm.unset("down")
    slurm.unset("lost")
    assert run.status().job_id == "1" and slurm.jobs == {"1": "PENDING"}


def test_of_two_that_resume_at_once_one_succeeds_and_the_other_says_who_has_it(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has seen that the run is over before the first one claims it."""
    seen = run.status()
    assert run.start_again().job_id == "1"
    monkeypatch.setattr(primeslurm.api.runs.run.Run, "status", lambda *_: seen)
    with pytest.raises(UsageError) as refused:
        run.start_again()
    assert "is in use: there is nothing to resume, slurm job 1 (attempt 2, submitted from" in str(refused.value)
    assert refused.value.exit_code == 2 and slurm.jobs == {"1": "PENDING"}


def test_a_submission_under_way_is_seen_and_left_alone(
    run: Run, slurm: FakeSlurm, resume: Callable[[], subprocess.Popen[str]]
) -> None:
    """sbatch has not reached Slurm yet: there is no job that could be found."""
    slurm.set("early")
    process = resume()
    until((slurm.directory / "called").exists)
    status = run.status()
    assert status.phase == "pending" and status.reason.startswith("SUBMITTING by process")
    with pytest.raises(UsageError, match="a slurm job that is being submitted"):
        run.start_again()
    process.kill()
    process.communicate()
    assert run.status().reason == "SUBMITTING, sbatch has not answered", "it lives on"
    slurm.unset("early")
    until(lambda: slurm.jobs and run.status().job_id == "1")


def test_a_copy_of_a_run_neither_resumes_nor_cancels_the_original(run: Run, slurm: FakeSlurm, tmp_path: Path) -> None:
    run.start_again()
    shutil.copytree(run.path, tmp_path / "runs" / "copy")
    copy = Run(tmp_path / "runs" / "copy")
    for verb in (copy.start_again, copy.cancel):
        with pytest.raises(UsageError, match="is a copy of"):
            verb()
    assert slurm.jobs == {"1": "PENDING"} and not (run.path / "attempts/2/cancel").exists()


def test_a_run_directory_that_was_left_half_made_is_told(run: Run, tmp_path: Path) -> None:
    half = RunDirectory(tmp_path / "runs" / "half")
    half.attempt(1).record_job(JobRecord("", "slurm", 1.0, submission="w"))
    words = "its submission was interrupted before there was a job"
    with pytest.raises(primeslurm.RunError, match=f"has no lock.json; {words}: remove it"):
        primeslurm.find_run(half.path)
    (violation,) = name_in_use(half.path)
    assert words in violation.fix
    half.attempt(1).prepare(run.plan())
    half.attempt(1).record_job(JobRecord("5", "slurm", 1.0, submission="w"))
    with pytest.raises(primeslurm.RunError, match=r"has no lock\.json$"):
        primeslurm.find_run(half.path)


def test_a_local_run_of_another_host_is_resumed_only_once_it_was_given_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes cannot be seen from here."""
    attempt = run.directory.attempt(1)
    local = run.plan().model_copy(update={"executor": "local"})
    (attempt.path / "end.json").unlink()
    attempt.prepare(local)
    attempt.record_job(JobRecord("1", "local", time.time(), None, "w", "elsewhere", 7))
    assert run.status().active
    with pytest.raises(UsageError, match=r"local job 1 \(attempt 1, submitted from elsewhere"):
        run.start_again()
    monkeypatch.setattr(primeslurm.api.runs.run, "CANCEL_GRACE_S", 0.0)
    assert run.cancel()
    assert run.status().phase == "lost"
