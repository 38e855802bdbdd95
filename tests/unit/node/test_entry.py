"""The submitit task with real processes and the local executor: attempts, requeue, resume, cancellation."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primeslurm.base.errors import RunError
from primeslurm.base.files import write_json
from primeslurm.node import entry
from primeslurm.node.entry import AgentTask
from primeslurm.plan.model import Plan, Process
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.slurm.launch_failures import START
from primeslurm.slurm.local import submit
from tests.support.plans import SLEEP, plan_of, process, python
from tests.support.waiting import wait_until
from tests.unit.node.test_attempt_start import Clock

# A trainer that dies in the first attempt and succeeds in the second.
SECOND_TRY = python("import sys; sys.exit(0 if sys.argv[1] == '2' else 1)", "${attempt}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[RunDirectory, str]]]:
    started: list[tuple[Plan, str]] = []

    def run(*nodes: tuple[Process, ...]) -> tuple[RunDirectory, str]:
        plan = plan_of(tmp_path / "run", *nodes)
        plan = plan.model_copy(update={"addresses": {f"local-{i}": f"127.0.0.{i + 1}" for i in range(len(nodes))}})
        directory = RunDirectory(tmp_path / "run")
        directory.attempt(1).prepare(plan)
        directory.attempt(1).record_job(JobRecord("", "local", time.time(), submission="w"))
        write_json(directory.path / "lock.json", {"run_id": "test-id"})
        started.append((plan, submit.submit_local(plan, AgentTask(plan.run_dir, 1, "w"), "w")))
        return directory, started[-1][1]

    yield run
    for plan, job_id in started:
        with contextlib.suppress(RunError):  # it has already ended
            submit.cancel(plan, job_id)


def end_of(run: RunDirectory, attempt: int) -> EndRecord:
    return wait_until(run.attempt(attempt).end)


def test_a_failed_attempt_is_requeued_and_the_next_one_completes(
    start: Callable[..., tuple[RunDirectory, str]],
) -> None:
    orchestrator = process("orchestrator", 0, python("pass"), "orchestrator")
    run, job_id = start((orchestrator,), (process("trainer-rank-0", 1, SECOND_TRY, "trainer"),))
    first, second = end_of(run, 1), end_of(run, 2)
    assert (first.outcome, first.reason, first.requeued) == ("failed", "trainer-rank-0 ended with exit code 1", True)
    assert (second.outcome, second.requeued) == ("completed", False)
    wait_until(lambda: not submit.is_running(run.attempt(2).plan(), job_id))
    assert [attempt.number for attempt in run.attempts()] == [1, 2]


def test_ending_the_controller_ends_every_agent_and_process(start: Callable[..., tuple[RunDirectory, str]]) -> None:
    run, job_id = start(
        (process("orchestrator", 0, SLEEP, "orchestrator"),), (process("trainer-rank-0", 1, SLEEP, "trainer"),)
    )
    plan = run.attempt(1).plan()
    agent_file = run.attempt(1).agent_file(1)
    wait_until(lambda: agent_file.exists() and '"ready"' in agent_file.read_text())
    submit.cancel(plan, job_id)
    wait_until(lambda: not submit.is_running(plan, job_id))
    record = end_of(run, 1)
    assert (record.outcome, record.reason, record.requeued) == ("cancelled", "SIGTERM", False)
    for index in (0, 1):
        assert '"pid": null' in run.attempt(1).agent_file(index).read_text()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentTask]:
    """Run the only task of a run that completes, in this process, as submitit does."""
    last = process("trainer-rank-0", 0, python("pass"), "trainer")
    plan = plan_of(tmp_path / "run", (last,)).model_copy(update={"addresses": {"local-0": "127.0.0.1"}})
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(plan)
    attempt.record_job(JobRecord("1", "local", time.time(), submission="w"))
    ids = {"JOB_ID": "1", "NTASKS": "1", "JOB_NUM_NODES": "1", "NODEID": "0", "GLOBALID": "0", "LOCALID": "0"}
    for name, value in ids.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    monkeypatch.setenv(START, "first")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    signal.signal(signal.SIGTERM, lambda *_: None)  # submitit ignores it
    yield AgentTask(plan.run_dir, 1, "w")
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGTERM, "cancelled"), (signal.SIGUSR2, "preempted")])
def test_a_signal_before_the_agent_exists_is_not_lost(
    number: signal.Signals, outcome: str, alone: AgentTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = entry.enter

    def checkpoint(*_: object) -> None:
        raise SystemExit(alone.checkpoint() is not None)

    def signalled(*args: object, **options: float) -> object:
        os.kill(os.getpid(), number)
        return enter(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(entry, "enter", signalled)
    signal.signal(signal.SIGUSR2, checkpoint)
    requeued = False
    try:
        alone()
    except SystemExit as leave:
        requeued = bool(leave.code)
    end = RunDirectory(tmp_path / "run").attempt(1).end()
    assert end is not None and end.outcome == outcome
    assert end.requeued is requeued is (number == signal.SIGUSR2)


def test_a_warning_after_the_end_does_not_requeue_a_complete_run(alone: AgentTask) -> None:
    assert alone() == "completed"
    assert alone.checkpoint() is None


@pytest.mark.parametrize(("recorded_at", "left_at"), [(0.5, 1.0), (7.0, 7.0), (None, 30.0)])
def test_agents_end_once_one_of_them_has_acted_for_a_dead_head(
    recorded_at: float | None, left_at: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eleventh agent waits for 30 s. Slurm starts a component again only when all its agents have ended."""
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(plan_of(tmp_path / "run", (process("trainer-rank-0", 0, SLEEP, "trainer"),)))
    end = EndRecord("failed", "the head's agent was killed", "head", 3, True, "", 1.0)
    clock = Clock()
    monkeypatch.setattr(entry, "time", clock)
    if recorded_at is not None:
        clock.after[recorded_at] = lambda: attempt.record_end(end)
    assert entry._ended_by_another(attempt, entry.DEPUTY_S * 10) is (recorded_at is not None)
    assert clock.now == left_at


def test_an_agent_keeps_neither_arrays_nor_recipes_nor_the_head_in_memory() -> None:
    """Emulated clusters have hundreds of agents on one machine."""
    code = (
        "import sys\n"
        "from primeslurm.node import start_agent\n"
        "with start_agent.hide_module('numpy'):\n"
        "    import submitit.core.submission\n"
        "import primeslurm.node.entry\n"
        "assert 'numpy' not in sys.modules, [name for name in sys.modules if 'numpy' in name][:3]\n"
        "unused = 'recipe.recipe', 'recipe.sections', 'plan.checks', 'node.head'\n"
        "loaded = [name for name in unused if f'primeslurm.{name}' in sys.modules]\n"
        "assert not loaded, loaded\n"
        "import numpy\n"
        "with start_agent.hide_module('numpy'):\n"
        "    assert sys.modules['numpy'] is numpy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
