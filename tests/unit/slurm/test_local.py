"""A Plan's agents as local processes: real submitit, real processes, no Slurm."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from primeslurm.base.errors import RunError
from primeslurm.plan.model import Plan
from primeslurm.slurm.local import submit
from primeslurm.slurm.local.controller import PlanController
from tests.cluster.toy import ToyAgent, notes
from tests.support.slurm_plans import group, plan
from tests.support.waiting import wait_until

CHECKOUT = str(Path(__file__).parents[3])


def make(run_dir: Path) -> Plan:
    groups = (group(0, "control"), group(1, "train", 2))
    return plan(run_dir, *groups, env={"PYTHONPATH": CHECKOUT})


def said(run_dir: Path, what: str) -> list[int]:
    return sorted(note["rank"] for note in notes(run_dir) if note["what"] == what)


def test_requeue_from_inside(tmp_path: Path) -> None:
    given = make(tmp_path)
    job_id = submit.submit_local(given, ToyAgent(tmp_path, requeue_itself=True, held=True), "w-of-this-test")
    assert submit.is_running(given, job_id)
    wait_until(lambda: submit.find("w-of-this-test") == job_id)  # found by its word alone, as after a killed submission
    ToyAgent.let_go(tmp_path)
    wait_until(lambda: not submit.is_running(given, job_id))
    assert said(tmp_path, "start") == [0, 0, 1, 1, 2, 2]
    assert said(tmp_path, "checkpoint") == [0]
    assert said(tmp_path, "TERM") == [1, 2]
    assert said(tmp_path, "end") == [0, 1, 2]


LISTENER = f"""
import os, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit({LOCAL_REQUEUE_RETURN_CODE}))
open(sys.argv[1] + os.environ["SUBMITIT_LOCAL_GLOBALID"], "w").close()
time.sleep(600)
"""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanController]:
    """Return the exit codes of two tasks that request a requeue on USR2, one second after their start."""
    options = {"NTASKS": "2", "TIMEOUT_S": "600", "SIGNAL_DELAY_S": "599", "WITH_SHELL": ""}
    options["COMMAND"] = shlex.join([sys.executable, "-c", LISTENER, str(tmp_path / "listens-")])
    for name, value in options.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", value)
    monkeypatch.setenv("SUBMITIT_STDERR_TO_STDOUT", "1")
    handler = signal.getsignal(signal.SIGTERM)
    made = PlanController(tmp_path / "submitit")
    yield made
    made.kill_tasks()
    signal.signal(signal.SIGTERM, handler)


def test_all_tasks_are_warned_of_the_time_limit_and_may_requeue(controller: PlanController, tmp_path: Path) -> None:
    controller.start_tasks()
    wait_until(lambda: len(list(tmp_path.glob("listens-*"))) == 2)
    assert LOCAL_REQUEUE_RETURN_CODE in controller.wait()  # its time limit starts here
    assert [task.wait(600) for task in controller.tasks] == [LOCAL_REQUEUE_RETURN_CODE] * 2


def test_an_allocation_of_slurm_ends_the_run_with_a_checkpoint_and_no_other_attempt(
    controller: PlanController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 300))  # before the time limit of the run, 600 s
    controller.start_tasks()
    wait_until(lambda: len(list(tmp_path.glob("listens-*"))) == 2)
    assert LOCAL_REQUEUE_RETURN_CODE not in controller.wait()
    assert [task.wait(600) for task in controller.tasks] == [LOCAL_REQUEUE_RETURN_CODE] * 2


def test_a_run_inside_an_allocation_has_its_gpus_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_GPUS": "2,5", "SLURM_JOB_END_TIME": "4000000000", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started: dict[str, dict[str, str]] = {}

    class Process:
        pid = 1

        def __init__(self, argv: list[str], **options: Any) -> None:
            started["env"] = options["env"]

    monkeypatch.setattr(submit.subprocess, "Popen", Process)
    submit.submit_local(make(tmp_path), ToyAgent(tmp_path, requeue_itself=False), "w")
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_END_TIME", "SLURM_JOB_ID", "SLURM_JOB_GPUS")
    assert [started["env"].get(name) for name in names] == ["2,5", "4000000000", None, None]


def test_local_run_outlives_the_submitter_and_can_be_cancelled(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.slurm.test_local import *; "
        "d = Path(sys.argv[1]); print(submit.submit_local(make(d), ToyAgent(d, requeue_itself=False), 'w'))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    job_id = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.strip()
    given = make(tmp_path)
    wait_until(lambda: len(said(tmp_path, "start")) == 3)
    submit.cancel(given, job_id)
    wait_until(lambda: not submit.is_running(given, job_id))
    assert said(tmp_path, "TERM") == [0, 1, 2]
    assert said(tmp_path, "checkpoint") == []
    with pytest.raises(RunError, match="does not run"):
        submit.cancel(given, job_id)


def test_another_process_with_the_pid_is_not_the_job(tmp_path: Path) -> None:
    assert not submit.is_running(make(tmp_path), "1")
