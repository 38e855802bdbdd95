"""Targets of `attach`, and a command next to a process of a local run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from primeslurm.api.runs.attach import find_target, step_command
from primeslurm.base.errors import RunError, UsageError
from primeslurm.base.files import read_json, write_json
from primeslurm.node.entry import AgentTask
from primeslurm.plan.model import Process
from primeslurm.records.attempt import JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.plan_outline import read_outline
from primeslurm.slurm.client import JobComponent, JobState
from primeslurm.slurm.local import submit
from tests.support.cli import primeslurm
from tests.support.plans import plan_of, python
from tests.support.waiting import wait_until

CHECKOUT = str(Path(__file__).parents[3])


def job(*states: str) -> JobState:
    components = tuple(JobComponent(str(70 + i), i, "gpu", state, "n[1-2]") for i, state in enumerate(states))
    return JobState("70", states[0], "", 0, "", None, components, "scontrol")


def test_component_is_reached_through_the_leader() -> None:
    argv = step_command(job("RUNNING", "RUNNING"), 1, "n2", ["true"], terminal=True)
    assert argv[:3] == ["srun", "--jobid=70", "--het-group=1"] and argv[-2:] == ["--pty", "true"]
    assert "--overlap" in argv and "--nodelist=n2" in argv


def test_single_component_job_has_no_het_group_and_containers_are_entered() -> None:
    argv = step_command(job("RUNNING"), 0, "n1", ["true"], more=("--container-image=i",), terminal=False)
    assert argv[-2:] == ["--container-image=i", "true"] and not any("het" in word or word == "--pty" for word in argv)


@pytest.mark.parametrize(("state", "group"), [("PENDING", 0), ("RUNNING", 5)])
def test_attach_to_a_job_that_does_not_run_is_refused(state: Literal["PENDING", "RUNNING"], group: int) -> None:
    with pytest.raises(RunError, match="job 70 does not run"):
        step_command(job(state, state), group, "n1", ["true"], terminal=False)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A local run of one node whose only process sleeps."""
    process = Process(
        name="trainer-rank-0",
        role="trainer",
        node=0,
        argv=python("import time; time.sleep(600)"),
        env={"RANK": "0"},
        log="logs/trainer/trainer-rank-0.log",
    )
    directory = RunDirectory(tmp_path / "runs" / "here")
    changes = {"env": {"PYTHONPATH": CHECKOUT}, "addresses": {"local-0": "127.77.0.1"}}
    plan = plan_of(directory.path, (process,)).model_copy(update=changes)
    attempt = directory.attempt(1)
    attempt.prepare(plan)
    write_json(directory.path / "lock.json", {"run_id": "here-1", "created_at": time.time()})
    attempt.record_job(JobRecord("", "local", time.time(), submission="w"))
    job_id = submit.submit_local(plan, AgentTask(plan.run_dir, 1, "w"), "w")
    attempt.record_job(JobRecord(job_id, "local", time.time(), submission="w"))
    yield directory
    submit.cancel(plan, job_id)
    wait_until(lambda: not submit.is_running(plan, job_id))


def test_local_process_is_found_by_process_role_or_node(run: RunDirectory, tmp_path: Path) -> None:
    attempt = run.attempt(1)
    wait_until(lambda: (read_json(attempt.fleet_file) or {}).get("states") == {"trainer-rank-0": "HEALTHY"})
    result = primeslurm("attach", "here", "trainer", "--", "sh", "-c", "echo $RANK $PWD; exit 5", cwd=tmp_path)
    assert (result.code, result.out) == (5, f"0 {run.path}\n"), result.err
    placement = read_outline(attempt)
    by_process = find_target(placement, attempt, "trainer-rank-0")
    assert find_target(placement, attempt, "trainer") == by_process
    assert find_target(placement, attempt, "0").process is None
    assert find_target(placement, attempt, by_process.report.name).node == 0
    with pytest.raises(UsageError, match="did you mean trainer"):
        find_target(placement, attempt, "triner")


def test_node_without_a_heartbeat_cannot_be_entered(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    process = Process(name="router-0", role="router", node=0, argv=("true",), log="x.log")
    directory.attempt(1).prepare(plan_of(directory.path, (process,)))
    with pytest.raises(RunError, match="node 0 of r has not reported in attempt 1"):
        find_target(read_outline(directory.attempt(1)), directory.attempt(1), "router")
    write_json(directory.path / "lock.json", {"run_id": "r-1"})
    result = primeslurm("attach", directory.path, "router", cwd=tmp_path)
    assert (result.code, result.err) == (4, "error: r does not run\n")
