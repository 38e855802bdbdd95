"""Liveness of head and agents, as `status` and `doctor` show it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from primeslurm.base.files import write_atomic, write_json
from primeslurm.plan.model import Process
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.records.fleet import AgentReport, AssignedAgent, AssignmentRecord, FleetView, ProcessReport
from primeslurm.run.diagnosis.doctor import Diagnosis, diagnose
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status import liveness
from primeslurm.run.status.liveness import state_from_agent, unresponsive_writers
from primeslurm.run.status.run_status import NO_ANSWER, RunStatus, read_status
from tests.support.plans import plan_of, python

ENGINE, TRAINER = "decode-r0-0", "trainer-rank-0"
NOW = time.time()
"""The time of all looks at runs, however late they are."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A healthy run with a trainer on the head node, and an engine on another node."""
    processes = [
        Process(name=name, role=role, node=node, argv=python("pass"), log=f"{name}.log")  # type: ignore[arg-type]
        for node, (name, role) in enumerate([(TRAINER, "trainer"), (ENGINE, "decode")])
    ]
    directory = RunDirectory(tmp_path / "r")
    attempt = directory.attempt(1)
    attempt.prepare(plan_of(directory.path, *[(process,) for process in processes]))
    attempt.record_job(JobRecord("7", "slurm", time.time()))
    write_json(directory.path / "lock.json", {"run_id": "r-1", "created_at": time.time()})
    write_json(directory.path / "recipe.resolved.json", {"max_steps": 9})
    assignment = AssignmentRecord(1, {0: AssignedAgent(0, "n1"), 1: AssignedAgent(1, "n2")})
    write_json(attempt.assignment_file, msgspec.to_builtins(assignment))
    return directory


def wrote(path: Path, record: msgspec.Struct, ago: float, skew: float = 0.0) -> None:
    """Write a record with this age [s], by a writer whose clock is ahead by `skew`."""
    at = NOW - ago
    write_json(path, msgspec.to_builtins(msgspec.structs.replace(record, time=at + skew)))  # type: ignore[type-var]
    os.utime(path, (at, at))


def head(run: RunDirectory, ago: float, skew: float = 0.0) -> None:
    wrote(run.attempt(1).fleet_file, FleetView(0.0, states={TRAINER: "HEALTHY", ENGINE: "HEALTHY"}), ago, skew)


def agent(run: RunDirectory, rank: int, ago: float, state: str = "ready", skew: float = 0.0) -> None:
    name = (TRAINER, ENGINE)[rank]
    processes = {name: ProcessReport(state, pid=40 + rank, healthy=True)}
    report = AgentReport(rank, f"n{rank + 1}", "10.0.0.1", 0.0, agent_pid=1, node=rank, processes=processes)
    wrote(run.attempt(1).agent_file(rank), report, ago, skew)


def status(
    run: RunDirectory, job: str | None = "RUNNING", look_s: float = 0.0, *, words: tuple[str, ...] = ()
) -> RunStatus:
    causes = list(words)
    return read_status(run, lambda _: job, find_causes=lambda *_: causes, processes=True, recheck_s=look_s, now=NOW)


def diagnosis(run: RunDirectory, job: str | None = "RUNNING") -> Diagnosis:
    causes = ["Slurm says that n1 is down"]
    return diagnose(run, run.attempt(1), lambda _: job, find_causes=lambda *_: causes, recheck_s=0.0, now=NOW)


def states(shown: RunStatus) -> dict[str, str]:
    return {process.name: process.state for process in shown.processes}


def test_unresponsive_head_is_reported_with_its_age(run: RunDirectory) -> None:
    head(run, 12)
    agent(run, 0, 12)
    agent(run, 1, 1)
    shown = status(run, words=("Slurm says that n1 is down",))
    assert (shown.phase, shown.reason) == ("silent", "the head is unresponsive, but the job is RUNNING")
    assert shown.silence is not None
    assert shown.silence.text == "the head (on n1) has not written for 12 s; this status is from then"
    assert (shown.silence.agents, shown.silence.silent_agents) == (2, 1)
    assert shown.silence.causes == [
        "all other agents write (1): the head's process or node is gone or stopped",
        "Slurm says that n1 is down",
    ]
    assert states(shown) == {TRAINER: "UNKNOWN", ENGINE: "HEALTHY"}
    (unknown,) = shown.unhealthy
    assert unknown.since == pytest.approx(NOW - 12)
    assert msgspec.to_builtins(shown)["silence"]["seconds"] == pytest.approx(12)


@pytest.mark.parametrize("skew", [-1800.0, -3 * 86400.0])
def test_head_with_a_clock_set_back_has_a_short_age(run: RunDirectory, skew: float) -> None:
    head(run, 12, skew)
    agent(run, 0, 12, skew=skew)
    agent(run, 1, 1)
    shown = status(run)
    assert shown.silence is not None and shown.silence.seconds == pytest.approx(12, abs=5)


def test_head_with_a_longer_heartbeat_has_a_longer_timeout(run: RunDirectory) -> None:
    rarely = FleetView(0.0, states={TRAINER: "HEALTHY", ENGINE: "HEALTHY"}, heartbeat_s=5.0)
    wrote(run.attempt(1).fleet_file, rarely, 40)
    assert status(run).phase == "running"
    wrote(run.attempt(1).fleet_file, rarely, 60)
    assert status(run).phase == "silent"


def test_causes_name_what_agents_saw(run: RunDirectory) -> None:
    head(run, 20)
    agent(run, 0, 1)
    agent(run, 1, 1, state="backoff")
    shown = status(run)
    assert states(shown) == {TRAINER: "HEALTHY", ENGINE: "RESTARTING"}
    assert shown.silence is not None
    assert shown.silence.causes == ["all 2 agents write: the head alone is unresponsive"]


@pytest.mark.parametrize("skew", [-3600.0, -40.0, 5.0, 40.0, 3600.0])
def test_head_with_a_wrong_clock_is_responsive_while_it_writes(run: RunDirectory, skew: float) -> None:
    head(run, 0, skew)
    stop = threading.Event()

    def write() -> None:
        while not stop.wait(0.1):
            head(run, 0, skew)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert status(run, look_s=60).phase == "running"
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("skew", [5.0, 40.0, 3600.0])
def test_head_with_a_fast_clock_that_stopped_is_unresponsive(run: RunDirectory, skew: float) -> None:
    head(run, 12, skew)
    shown = status(run)
    assert shown.phase == "silent" and shown.silence is not None
    assert shown.silence.seconds == pytest.approx(12, abs=5), "by the clock of the file system"
    assert any("clocks differ" in cause for cause in shown.silence.causes) == (skew > 14)


@pytest.mark.parametrize(("text", "word"), [(b"", "empty"), (b'{"time": 17', "damaged")])
def test_damaged_heartbeat_of_the_head_is_unresponsive(run: RunDirectory, text: bytes, word: str) -> None:
    write_atomic(run.attempt(1).fleet_file, text)
    agent(run, 0, 1)
    write_atomic(run.attempt(1).agent_file(1), text)
    shown = status(run)
    assert shown.phase == "silent" and shown.silence is not None
    assert f"{run.attempt(1).fleet_file} is {word}" in shown.silence.causes
    assert states(shown) == {TRAINER: "HEALTHY", ENGINE: "UNKNOWN"}
    assert diagnosis(run).outcome == "silent"


def test_equally_unresponsive_agents_share_a_cause(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    head(run, 15)
    agent(run, 0, 15)
    agent(run, 1, 15)

    class ReadOnly:
        f_flag, f_blocks, f_bavail, f_files, f_favail = os.ST_RDONLY, 10, 0, 10, 0
        f_frsize, f_bsize, f_bfree = 4096, 4096, 0

    monkeypatch.setattr(liveness.os, "statvfs", lambda path: ReadOnly())
    shown = status(run)
    assert shown.silence is not None and states(shown) == {TRAINER: "UNKNOWN", ENGINE: "UNKNOWN"}
    place = run.attempt(1).path
    assert shown.silence.causes == [
        f"the file system of {place} is read-only, as this machine sees it",
        f"the file system of {place} is full",
        f"the file system of {place} has no room for another file (inodes)",
        "none of the 2 agents writes either: their file system, their nodes, or all were stopped",
    ]


def test_read_only_run_directory_is_a_cause(run: RunDirectory) -> None:
    events = run.attempt(1).path / "events"
    events.chmod(0o500)
    try:
        assert liveness.file_system_faults(run.attempt(1).path) == [f"their owner may not write to {events} (0500)"]
    finally:
        events.chmod(0o700)
    assert liveness.file_system_faults(run.attempt(1).path) == []


@pytest.mark.parametrize(
    ("job", "phase"),
    [
        ("SUSPENDED", "silent"),
        (NO_ANSWER, "silent"),
        (None, "lost"),
        ("NODE_FAIL", "failed"),
        ("PENDING (x)", "pending"),
    ],
)
def test_slurm_state_decides_whether_a_run_is_lost(run: RunDirectory, job: str | None, phase: str) -> None:
    head(run, 15)
    assert status(run, job).phase == phase


def test_run_is_not_lost_while_slurm_does_not_answer(run: RunDirectory) -> None:
    head(run, 1)
    assert (status(run, NO_ANSWER).phase, diagnosis(run, NO_ANSWER).outcome) == ("running", "running")
    assert diagnosis(run, NO_ANSWER).well
    head(run, 30)
    assert status(run, NO_ANSWER).reason == "the head is unresponsive, and Slurm does not answer"


def test_doctor_names_the_unresponsive_head_and_its_cause(run: RunDirectory) -> None:
    head(run, 23)
    agent(run, 0, 23)
    agent(run, 1, 1)
    shown = diagnosis(run)
    assert not shown.well and shown.first is not None
    assert shown.outcome == "silent" and shown.reason.startswith("the head (on n1) has not written for 2")
    assert shown.first.failure.component == "head" and shown.first.failure.time > 1e9
    assert "Slurm says that n1 is down" in [cause.cause for cause in shown.first.causes]


def test_doctor_names_an_unresponsive_agent_before_the_head_gives_it_up(run: RunDirectory) -> None:
    head(run, 0)
    agent(run, 0, 0)
    agent(run, 1, 15)
    shown = diagnosis(run)
    assert shown.outcome == "running" and shown.first is not None
    assert (shown.first.failure.component, shown.first.failure.node) == ("node n2", "n2")
    assert "has not written for 1" in shown.first.failure.how


def test_nothing_is_healthy_after_an_end_without_the_head(run: RunDirectory) -> None:
    head(run, 100)
    run.attempt(1).record_end(
        EndRecord("failed", "the head has been silent for 40 s", "head", 4, True, "", time.time())
    )
    shown = status(run, "PENDING (Resources)")
    assert shown.phase == "requeued" and shown.roles == {"trainer": {"UNKNOWN": 1}, "decode": {"UNKNOWN": 1}}


def test_failure_without_a_time_gets_the_time_of_the_submission(run: RunDirectory) -> None:
    write_json(run.attempt(1).path / "job.json", {"job_id": "7", "executor": "slurm", "submitted_at": 1.79e9})
    shown = diagnosis(run, "NODE_FAIL")
    assert shown.first is not None and shown.first.failure.time == 1.79e9


def test_writers_that_replace_their_files_are_responsive(tmp_path: Path, replacing: Callable[[Path], None]) -> None:
    old, live = tmp_path / "old", tmp_path / "live"
    for path in (old, live):
        path.write_text("1")
        os.utime(path, (1e9, 1e9))
    replacing(live)
    assert unresponsive_writers({old: 1e9, live: 1e9}, time.time(), recheck_s=5.0) == {old: 1e9}


@pytest.fixture
def replacing() -> Callable[[Path], None]:
    def start(path: Path) -> None:
        timer = threading.Timer(0.3, lambda: path.write_text("22"))
        timer.start()

    return start


@pytest.mark.parametrize(
    ("last", "reported", "state"),
    [
        ("STALE", "ready", "STALE"),
        ("LOADING", "ready", "HEALTHY"),
        ("HEALTHY", "loading", "LOADING"),
        ("HEALTHY", "fallen", "RESTARTING"),
        ("HEALTHY", "failed", "DEAD"),
        ("HEALTHY", "stopped", "DONE"),
        ("STARTING", None, "STARTING"),
    ],
)
def test_state_of_a_process_comes_from_its_agent(last: str, reported: str | None, state: str) -> None:
    assert state_from_agent(last, reported) == state
