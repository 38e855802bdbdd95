"""A Plan's agents as local processes: real submitit, real processes, no Slurm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from primeslurm.errors import RunError
from primeslurm.plan.model import Plan
from primeslurm.slurm import local
from tests.cluster.toy import ToyAgent, notes
from tests.support.slurm_plans import group, plan

CHECKOUT = str(Path(__file__).parents[2])


def make(run_dir: Path, **job: object) -> Plan:
    groups = (group(0, "control"), group(1, "train", 2))
    return plan(run_dir, *groups, env={"PYTHONPATH": CHECKOUT}, **job)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def said(run_dir: Path, what: str) -> list[int]:
    return sorted(note["rank"] for note in notes(run_dir) if note["what"] == what)


def test_requeue_from_inside(tmp_path: Path) -> None:
    given = make(tmp_path)
    job_id = local.submit_local(given, ToyAgent(tmp_path, requeue_itself=True))
    assert local.is_running(given, job_id)
    wait(lambda: not local.is_running(given, job_id))
    assert said(tmp_path, "start") == [0, 0, 1, 1, 2, 2]
    assert said(tmp_path, "checkpoint") == [0]
    assert said(tmp_path, "TERM") == [1, 2]
    assert said(tmp_path, "end") == [0, 1, 2]


def test_the_time_limit_requeues(tmp_path: Path) -> None:
    """USR2 comes signal_s before the limit: here after 15 s, when the agent surely listens."""
    given = make(tmp_path, time="00:01:00", signal_s=45)
    job_id = local.submit_local(given, ToyAgent(tmp_path, requeue_itself=False))
    wait(lambda: not local.is_running(given, job_id))
    assert said(tmp_path, "checkpoint") == [0]
    assert said(tmp_path, "end") == [0, 1, 2]


def test_it_outlives_the_one_who_submits_and_can_be_cancelled(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_local import *; "
        "d = Path(sys.argv[1]); print(local.submit_local(make(d), ToyAgent(d, requeue_itself=False)))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    job_id = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()
    given = make(tmp_path)
    wait(lambda: len(said(tmp_path, "start")) == 3)
    local.cancel(given, job_id)
    wait(lambda: not local.is_running(given, job_id))
    assert said(tmp_path, "TERM") == [0, 1, 2]
    assert said(tmp_path, "checkpoint") == []
    with pytest.raises(RunError, match="does not run"):
        local.cancel(given, job_id)


def test_another_process_with_the_pid_is_not_the_job(tmp_path: Path) -> None:
    assert not local.is_running(make(tmp_path), "1")
