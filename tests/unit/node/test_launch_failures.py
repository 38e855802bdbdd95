"""Agents that could not be started, according to srun."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from primeslurm.base.files import write_json
from primeslurm.node.agent.node_agent import HEARTBEATS_BEFORE_LOOK, HeadKillDetector
from primeslurm.node.attempt.batch_epilogue import BatchEpilogue, ending_of_step
from primeslurm.plan.model import Plan
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.records.fleet import AssignedAgent, AssignmentRecord, Ending, Outcome
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.slurm.launch_failures import (
    AGAIN,
    NODES,
    START,
    JobOutput,
    early_exits,
    killed_nodes,
    launch_failures,
    node_names,
    spares_suffice,
    step_without,
)
from tests.support.plans import plan_of
from tests.support.slurm_plans import group, plan

OUTPUT = """primeslurm: start 0
srun: error: Task launch for StepId=1.0 failed on node n9: Communication connection failure
primeslurm: start 1
srun: error: n002: task 1: Exited with exit code 127
3: srun: error: n004: task 4: Exited with exit code 1
srun: error: n[005,007-008]: tasks 4,6-7: Exited with exit code 2
srun: error: Task launch for StepId=1.0 failed on node n003: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: error: n001: task 0: Killed
"""


def test_srun_errors_of_the_newest_start_are_read(tmp_path: Path) -> None:
    path = tmp_path / "slurm-7.out"
    path.write_text(OUTPUT)
    lines = JobOutput(path, "1").news()
    assert launch_failures(lines) == {"n003": "Communication connection failure"}
    codes = {"n002": 127, "n005": 2, "n007": 2, "n008": 2}
    assert early_exits(lines) == {name: f"Exited with exit code {code}" for name, code in codes.items()}
    assert killed_nodes(lines) == {"n001": "Killed"}
    assert killed_nodes(f"{lines}{AGAIN}\n") == {}, "srun killed it because another node was unreachable"
    assert killed_nodes("srun: error: Node failure on n[003-004]\n") == {"n003": "node failure", "n004": "node failure"}
    assert JobOutput(path, "2").news() == ""


def test_an_agent_finds_that_the_head_was_killed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", (), ())
    path = RunDirectory(tmp_path / "run").job_output("7")
    path.parent.mkdir()
    watch = HeadKillDetector(plan, {"SLURM_JOB_ID": "7", NODES: "n001,n002", START: "1"})
    assert watch.killed(HEARTBEATS_BEFORE_LOOK, now=10.0) is None, "there is no output"
    path.write_text("primeslurm: start 1\nsrun: error: n002: task 1: Killed\n")
    assert watch.killed(HEARTBEATS_BEFORE_LOOK, now=20.0) is None
    with path.open("a") as handle:
        handle.write("srun: error: n001: task 0: Out Of Memory\n")
    assert watch.killed(HEARTBEATS_BEFORE_LOOK - 1.0, now=30.0) is None, "it has sent a heartbeat"
    assert watch.killed(HEARTBEATS_BEFORE_LOOK, now=40.0) == "Out Of Memory"
    assert HeadKillDetector(plan, {}).killed(HEARTBEATS_BEFORE_LOOK, now=50.0) is None, "not a Slurm job"


def test_the_output_of_a_start_is_read_once_and_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "slurm-7.out"
    output = JobOutput(path, "1")
    with pytest.raises(FileNotFoundError):
        output.news()
    pieces = (  # appended text, and the new lines
        (b"primeslurm: start 0\nold\nprimeslurm: sta", ""),
        (b"rt 1", ""),
        (b"1\nprimeslurm: start 1\nfirst", ""),
        (b"\nsecond \xc3", "first\n"),
        (b"", ""),
        (b"\xa4\nthird\n", "second \N{LATIN SMALL LETTER A WITH DIAERESIS}\nthird\n"),
        (b"", ""),
    )
    for piece, news in pieces:
        with path.open("ab") as handle:
            handle.write(piece)
        assert output.news() == news


def test_names_of_the_nodes_by_rank(tmp_path: Path) -> None:
    single = plan(tmp_path, group(0, "all", 3))
    assert node_names(single, {"SLURM_JOB_NODELIST": "n[1-2],x7"}) == ("n1", "n2", "x7")
    assert node_names(single, {}) == ()
    het = plan(tmp_path, group(0, "control"), group(1, "train", 2))
    environ = {"SLURM_JOB_NODELIST_HET_GROUP_0": "c1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[3-4]"}
    assert node_names(het, environ) == ("c1", "n3", "n4")


def needing(given: Plan, *nodes: int) -> Plan:
    """Return a plan whose groups need this many nodes. The other nodes are spares."""
    needed = [node for node in given.nodes if node.index_in_group < nodes[node.group]]
    return given.model_copy(update={"nodes": tuple(needed)})


def test_a_job_may_start_without_nodes_that_spares_replace(tmp_path: Path) -> None:
    single, names = needing(plan(tmp_path, group(0, "all", 4)), 3), ("n0", "n1", "n2", "n3")
    assert spares_suffice(single, names, {"n2"})
    assert not spares_suffice(single, names, {"n1", "n2"}), "there is one spare"
    assert not spares_suffice(single, names, {"n0"}), "the head has none"
    assert not spares_suffice(single, (), {"n2"}), "the nodes are unknown"
    het = needing(plan(tmp_path, group(0, "control", 2), group(1, "train", 2)), 1, 2)
    assert spares_suffice(het, names, {"n1"}) and not spares_suffice(het, names, {"n2"})
    alone = needing(plan(tmp_path, group(0, "control", 1), group(1, "train", 3)), 1, 2)
    assert not spares_suffice(alone, names, {"n3"}), "Slurm ends a job with a component of one node"


def test_the_step_runs_on_the_remaining_nodes(tmp_path: Path) -> None:
    names = ("n0", "n1", "n2", "n3")
    single = ["srun", "--nodes=3", "--ntasks=3", "--nodelist=n0,n2,n3", "--label", "python", "x"]
    assert step_without(plan(tmp_path, group(0, "all", 4)), names, {"n1"}, ["srun", "--label", "python", "x"]) == single
    het = plan(tmp_path, group(0, "control", 2), group(1, "train", 2))
    first = ["srun", "--het-group=0", "--nodes=2", "--ntasks=2", "--nodelist=n0,n1", "--label", "python", "x"]
    second = [":", "--het-group=1", "--nodes=1", "--ntasks=1", "--nodelist=n3", "--label", "python", "x"]
    step = ["srun", "--het-group=0,1", "--label", "python", "x"]
    assert step_without(het, names, {"n2"}, step) == [*first, *second]
    assert node_names(het, {NODES: ",".join(names)}) == names


RECORD = EndRecord("failed", "x", "y", None, requeued=True, why_not_requeued="", time=0.0)


@pytest.mark.parametrize(
    ("end", "state", "unreached", "reason", "suspect"),
    [
        (RECORD, "RUNNING", {"n1": "gone"}, None, ""),  # the head has recorded the end
        (None, "CANCELLED", {}, None, ""),  # scancel
        (None, "COMPLETING", {}, None, ""),
        (None, "PENDING", {"n1": "gone"}, None, ""),  # Slurm has requeued the job
        (None, "", {}, None, ""),
        (None, "RUNNING", {"n1": "gone"}, "node n1: no agent could be started (gone)", "n1"),
        (None, "RUNNING", {"n1": "gone", "n2": "x"}, "node n1: no agent could be started (gone), nor on 1 more", "n1"),
        (None, "RUNNING", {}, "srun ended with exit code 7, and no agent has said why", "job"),
    ],
)
def test_ending_of_a_failed_step(
    end: EndRecord | None, state: str, unreached: dict[str, str], reason: str | None, suspect: str
) -> None:
    expected = None if reason is None else Ending(Outcome.FAILED, reason, suspect)
    assert ending_of_step(end, state, 7, unreached, "") == expected


MEMORY = "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive"
REQUEUED = "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-01T10:00:00 DUE TO JOB REQUEUE ***"
NO_MODULE = "ModuleNotFoundError: No module named 'primeslurm'"


@pytest.mark.parametrize(
    ("output", "reason", "error"),
    [
        (f"{MEMORY}.\n{REQUEUED}\n", f"no agent could be started: {MEMORY}", MEMORY),
        (
            "srun: warning: can't honor --ntasks-per-node\n"
            "srun: error: Unable to create step for job 5: Invalid generic resource (gres) specification\n",
            "no agent could be started: srun: error: Unable to create step for job 5: Invalid generic resource (gres) "
            "specification",
            "srun: error: Unable to create step for job 5: Invalid generic resource (gres) specification",
        ),
        (
            f"0: Traceback (most recent call last):\n0: {NO_MODULE}\nsrun: error: n1: task 0: Exited with exit code 1\n"
            f"srun: Terminating StepId=5.0\n{REQUEUED}\n",
            f"srun ended with exit code 7, and no agent has said why: {NO_MODULE}",
            NO_MODULE,
        ),
        (f"{REQUEUED}\n", "srun ended with exit code 7, and no agent has said why", ""),
    ],
)
def test_a_missing_agent_is_explained_by_srun_or_by_its_output(output: str, reason: str, error: str) -> None:
    assert ending_of_step(None, "RUNNING", 7, {}, output) == Ending(Outcome.FAILED, reason, "job", error=error)


@pytest.fixture
def fake_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record calls of srun in a running job of four nodes. The step succeeds."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    running = "JobId=5 Partition=gpu JobState=RUNNING Reason=None Restarts=0 StartTime=now"
    for name, line in (
        ("scontrol", f'[ "$1" = ping ] && echo Slurmctld is UP || echo {running}'),
        ("srun", f'echo "$@" >> {tmp_path}/called'),
    ):
        (scripts / name).write_text(f"#!/bin/sh\n{line}\n")
        (scripts / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(scripts), prepend=os.pathsep)
    for variable, value in (("JOB_ID", "5"), ("RESTART_COUNT", "0"), ("JOB_NODELIST", "n[0-3]")):
        monkeypatch.setenv(f"SLURM_{variable}", value)
    monkeypatch.setenv(START, "s0")
    return scripts / "srun"


@pytest.fixture
def stopped(tmp_path: Path) -> Attempt:
    """An attempt with a spare. srun has ended its step, because it did not reach n2."""
    run = RunDirectory(tmp_path / "run")
    attempt = run.attempt(1)
    attempt.prepare(needing(plan(run.path, group(0, "all", 4)), 3))
    attempt.record_job(JobRecord("5", "slurm", 0.0, submission="w"))
    said = "srun: error: Task launch for StepId=5.0 failed on node n2: Communication connection failure"
    run.job_output("5").write_text(f"primeslurm: start s0\n{said}\n")
    return attempt


@pytest.mark.parametrize("assigned", [False, True])
def test_the_step_starts_again_even_after_an_assignment(
    assigned: bool, stopped: Attempt, fake_srun: Path, tmp_path: Path
) -> None:
    """On a slow machine the head reads srun's error before srun ends the head."""
    if assigned:
        assignment = AssignmentRecord(
            1, {0: AssignedAgent(0, "n0"), 1: AssignedAgent(1, "n1"), 2: AssignedAgent(3, "n3")}
        )
        write_json(stopped.assignment_file, msgspec.to_builtins(assignment))
    assert BatchEpilogue(RunDirectory(tmp_path / "run"), "w", [str(fake_srun), "--label", "agent"]).complete(1) == 0
    assert (tmp_path / "called").read_text() == "--nodes=3 --ntasks=3 --nodelist=n0,n1,n3 --label agent\n"
    assert not stopped.assignment().agents, "files of heads that have ended"
    assert stopped.end() is None
