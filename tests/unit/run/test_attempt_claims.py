"""Exclusive claims of attempts, and detection of copied run directories."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.records.attempt import JobRecord, StartRecord, TakenOverError, newest_attempt, require_newest
from primeslurm.run import attempt_claims
from primeslurm.run.attempt_claims import claim_attempt, claim_start, moved_or_copied, owner
from primeslurm.run.directory import RunDirectory
from tests.support.plans import plan_of

CLAIM = """
import sys, time
from pathlib import Path
from primeslurm.records.attempt import JobRecord
from primeslurm.run.attempt_claims import claim_attempt
from primeslurm.run.directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
plan = run.attempt(1).plan()
print("ready", flush=True)
sys.stdin.readline()
won = claim_attempt(run, 2, plan, JobRecord("", "local", 1.0, submission=sys.argv[2]))
print(won is not None)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    attempt = found.attempt(1)
    attempt.prepare(plan_of(found.path, ()))
    attempt.record_job(JobRecord("5", "slurm", 1.0, submission="one", host="login1"))
    return found


def test_exactly_one_of_many_processes_claims_an_attempt(run: RunDirectory) -> None:
    words = [f"w{i}" for i in range(6)]
    argv = [sys.executable, "-c", CLAIM, str(run.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen([*argv, word], text=True, **pipes) for word in words]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    won = [word for word, process in zip(words, processes, strict=True) if process.communicate()[0] == "True\n"]
    job = run.attempt(2).job()
    assert job is not None and won == [job.submission]
    assert run.attempt(2).plan() == run.attempt(1).plan()
    assert sorted(path.name for path in (run.path / "attempts").iterdir()) == ["1", "2"], "nothing is left of losers"


def test_attempt_belongs_to_one_start_of_a_job(run: RunDirectory) -> None:
    first, second = StartRecord("s1", "5", "n1", 1.0), StartRecord("s2", "5", "n1", 2.0)
    assert claim_start(run.attempt(1), first)
    assert not claim_start(run.attempt(1), second)
    assert run.attempt(1).start() == first


def test_rename_with_a_lost_answer_counts(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client repeats the request and then gets the error that the source does not exist."""
    rename = Path.rename

    def twice(path: Path, target: Path) -> Path:
        rename(path, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "rename", twice)
    job = JobRecord("", "slurm", 1.0, submission="two")
    assert claim_attempt(run, 2, run.attempt(1).plan(), job) is not None
    assert run.latest().number == 2


def test_other_errors_than_a_taken_name_are_raised(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        claim_attempt(run, 2, run.attempt(1).plan(), JobRecord("", "slurm", 1.0))
    assert [attempt.number for attempt in run.attempts()] == [1]


def test_old_attempt_cannot_write_once_there_is_a_newer_one(run: RunDirectory) -> None:
    require_newest(run.path, 1)
    assert claim_attempt(run, 2, run.attempt(1).plan(), JobRecord("", "slurm", 1.0)) is not None
    assert newest_attempt(run.path) == 2
    require_newest(run.path, 2)
    with pytest.raises(TakenOverError, match="attempt 2 has taken over the run from attempt 1"):
        require_newest(run.path, 1)


def test_owner_is_described_by_job_host_and_time(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert owner(run.attempt(1)).startswith("slurm job 5 (attempt 1, submitted from login1 at 1970-01-0")
    run.attempt(1).record_job(JobRecord("", "local", 1.0, host="login1"))
    assert owner(run.attempt(1)).startswith("a local job that is being submitted (attempt 1")


def test_copied_and_moved_runs_are_detected(run: RunDirectory, tmp_path: Path) -> None:
    plan = run.attempt(1).plan()
    assert moved_or_copied(run.path, plan) == []
    (tmp_path / "link").symlink_to(run.path)
    assert moved_or_copied(tmp_path / "link", plan) == [], "the same directory by another path"
    copy = tmp_path / "copy"
    copy.mkdir()
    (of_copy,) = moved_or_copied(copy, plan)
    assert of_copy.why.startswith(f"is a copy of {run.path}") and "export" in of_copy.fix
    run.path.rename(tmp_path / "moved")
    (moved,) = moved_or_copied(tmp_path / "moved", plan)
    assert moved.why == f"was moved: its plan was made for {run.path}"
    assert moved.fix == f"move it back, or `ln -s {tmp_path / 'moved'} {run.path}`"
    run.path.symlink_to(tmp_path / "moved")
    assert moved_or_copied(tmp_path / "moved", plan) == [], "the link that was advised"


def test_file_system_mounted_twice_is_no_copy(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run.attempt(1).plan()
    monkeypatch.setattr(Path, "samefile", lambda *_: False)
    assert moved_or_copied(run.path, plan) == []
    assert not list(run.path.glob(".same*"))
    assert attempt_claims.moved_or_copied(run.path.parent, plan)
