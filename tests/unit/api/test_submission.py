"""Interrupted submissions and lost answers: the job is found, and never submitted twice."""

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
RESUME = """
import signal, sys
from primeslurm.api.runs.run import find_run
# Tests that run under nohup or in the background ignore these signals, and so would this process.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
print(find_run(sys.argv[1]).start_again().job_id)
"""


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
    """Start `resume` in a new process and session, as a terminal does."""
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


def test_submission_token_is_recorded_before_sbatch(run: Run, slurm: FakeSlurm) -> None:
    submitted = run.start_again()
    job = run.directory.attempt(2).job()
    assert job is not None and submitted.job_id == job.job_id == "1"
    path = run.path / "attempts/2/job.sbatch"
    assert slurm.words("1") == f"--comment=primeslurm {job.submission} {path} {job.submission}\n"
    assert run.status().phase == "pending" and run.status().job_id == "1"


def test_comment_of_the_recipe_is_kept(run: Run, slurm: FakeSlurm) -> None:
    run.directory.attempt(1).prepare(plan(run.path, group(0, "all"), comment="project x"))
    run.start_again()
    assert "--comment" not in slurm.words("1")
    assert '--comment="project x"' in (run.path / "attempts/2/job.sbatch").read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.campaign)]
)
def test_signal_waits_until_the_job_is_recorded(
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
    """Submit a job, kill the submitter before sbatch answers, and return the id of the job."""
    slurm.set("hold")
    process = resume()
    until(lambda: slurm.jobs)
    process.kill()
    process.communicate()
    slurm.unset("hold")
    job = run.directory.attempt(2).job()
    assert job is not None and job.job_id == ""
    return "1"


def test_status_finds_the_job_of_a_killed_submission(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    status = run.status()
    assert (status.phase, status.job_id, status.reason) == ("pending", orphan, "PENDING")
    slurm.set("down")
    assert (job := run.directory.attempt(2).job()) is not None and job.job_id == orphan, "it is on record"


def test_cancel_finds_the_job_of_a_killed_submission(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    assert run.cancel()
    assert slurm.jobs == {orphan: "CANCELLED"}


def test_resume_finds_the_job_of_a_killed_submission_and_submits_none(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    with pytest.raises(UsageError, match=rf"is pending: there is nothing to resume, slurm job {orphan} \(attempt 2"):
        run.start_again()
    assert slurm.jobs == {orphan: "PENDING"}


def test_submission_killed_before_sbatch_can_be_resumed(run: Run, slurm: FakeSlurm) -> None:
    intent = JobRecord("", "slurm", time.time(), None, "gone", "", 0)
    assert claim_attempt(run.directory, 2, run.plan(), intent) is not None
    status = run.status()
    assert (status.phase, status.job_id) == ("lost", None)
    assert status.reason.startswith("the submission was interrupted before Slurm had the job")
    assert run.start_again().attempt == 3 and slurm.jobs == {"1": "PENDING"}


def test_resume_is_refused_while_slurm_does_not_answer(run: Run, orphan: str, slurm: FakeSlurm) -> None:
    slurm.set("down")
    with pytest.raises(ClusterError, match="Unable to contact"):
        run.start_again()
    silences: list[ClusterError] = []
    assert run.status(if_silent=silences.append).phase == "silent" and silences
    assert slurm.jobs == {orphan: "PENDING"}


@pytest.mark.parametrize(
    "error_text",
    [
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "",
    ],
)
def test_accepted_job_is_found_although_sbatch_failed(error_text: str, run: Run, slurm: FakeSlurm) -> None:
    slurm.set("lost", error_text)
    assert run.start_again().job_id == "1"
    assert run.status().phase == "pending" and slurm.jobs == {"1": "PENDING"}


@pytest.mark.parametrize("error_text", ["Invalid account", "Socket timed out on send/recv operation"])
def test_refused_job_leaves_no_run_directory(error_text: str, run: Run, slurm: FakeSlurm) -> None:
    slurm.set("refuse", f"sbatch: error: {error_text}")
    with pytest.raises(ClusterError, match=error_text):
        run.start_again()
    assert [path.name for path in (run.path / "attempts").iterdir()] == ["1"] and slurm.jobs == {}


def test_cancelled_components_of_a_refused_job_do_not_count(run: Run, slurm: FakeSlurm) -> None:
    error_text = "Batch job submission failed: Job violates accounting/QOS policy"
    slurm.set("broken", f"sbatch: error: {error_text}")
    with pytest.raises(ClusterError, match=error_text):
        run.start_again()
    assert [path.name for path in (run.path / "attempts").iterdir()] == ["1"]
    assert slurm.jobs == {"1": "CANCELLED"} and run.status().phase == "failed"
    slurm.unset("broken")
    assert run.start_again().job_id == "2"


def test_attempt_stays_while_the_job_is_unknown(run: Run, slurm: FakeSlurm) -> None:
    slurm.set("lost", "sbatch: error: Socket timed out on send/recv operation")
    slurm.set("down")
    with pytest.raises(ClusterError, match="it is unknown whether Slurm has the job"):
        run.start_again()
    slurm.unset("down")
    slurm.unset("lost")
    assert run.status().job_id == "1" and slurm.jobs == {"1": "PENDING"}


def test_one_of_two_simultaneous_resumes_succeeds(run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process has read the end of the run before the first one claims the attempt."""
    seen = run.status()
    assert run.start_again().job_id == "1"
    monkeypatch.setattr(primeslurm.api.runs.run.Run, "status", lambda *_: seen)
    with pytest.raises(UsageError) as refused:
        run.start_again()
    assert "is in use: there is nothing to resume, slurm job 1 (attempt 2, submitted from" in str(refused.value)
    assert refused.value.exit_code == 2 and slurm.jobs == {"1": "PENDING"}


def test_submission_in_progress_is_shown_and_not_changed(
    run: Run, slurm: FakeSlurm, resume: Callable[[], subprocess.Popen[str]]
) -> None:
    """sbatch has not reached Slurm yet, so Slurm does not know the job."""
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


def test_copied_run_cannot_be_resumed_or_cancelled(run: Run, slurm: FakeSlurm, tmp_path: Path) -> None:
    run.start_again()
    shutil.copytree(run.path, tmp_path / "runs" / "copy")
    copy = Run(tmp_path / "runs" / "copy")
    for verb in (copy.start_again, copy.cancel):
        with pytest.raises(UsageError, match="is a copy of"):
            verb()
    assert slurm.jobs == {"1": "PENDING"} and not (run.path / "attempts/2/cancel").exists()


def test_unfinished_run_directory_is_reported(run: Run, tmp_path: Path) -> None:
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


def test_local_run_of_another_host_is_resumed_only_after_cancel(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("torch", "cuda", "device"), [("2.13.0", "13.0", "cuda"), ("2.13.0+cpu", None, "cpu")])
def test_packages_are_compared_with_the_lock_of_their_device(torch: str, cuda: str | None, device: str) -> None:
    assert submission.device_of({"login": {"torch": torch, "cuda of torch": cuda}}) == device
