"""The status of a run directory with given answers of Slurm."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from threading import Barrier
from typing import Any

import msgspec
import pytest
from rich.console import Console

from primeslurm.base import durable, files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.base.files import read_json, write_json
from primeslurm.cli.views.status import view
from primeslurm.plan.model import Process, Replica
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.records.attempt import EndRecord, JobRecord, Obstacle
from primeslurm.records.fleet import (
    AgentReport,
    AssignedAgent,
    AssignmentRecord,
    Ending,
    FleetView,
    Outcome,
    ProcessReport,
)
from primeslurm.records.metrics import recent_rows
from primeslurm.records.state import EngineRecord, FailedRollouts
from primeslurm.run.bad_nodes import BadNode, write_excluded
from primeslurm.run.directory import RunDirectory, create, name_in_use
from primeslurm.run.status.run_status import BROKEN_UP, RlProgress, RunStatus, read_status
from primeslurm.run.status.summary import summarise
from primeslurm.wire.stored import checkpoints
from tests.support.plans import plan_of, python
from tests.support.recipes import site, write_recipe

NOW = 1000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    process = Process(name="decode-r0-0", role="decode", node=0, argv=python("pass"), log="x.log", replica=0)
    plan = plan_of(tmp_path / "r", (process,))
    directory = RunDirectory(tmp_path / "r")
    directory.attempt(1).prepare(plan)
    directory.attempt(1).record_job(JobRecord("7", "slurm", NOW))
    write_json(directory.path / "lock.json", {"run_id": "r-1", "created_at": NOW})
    write_json(directory.path / "recipe.resolved.json", {"max_steps": 9})
    return directory


def status(run: RunDirectory, job: str | None = None, processes: bool = False) -> RunStatus:
    return read_status(run, lambda record: job, now=NOW, processes=processes, recheck_s=0.0)


def fleet(run: RunDirectory, age: float = 0.0, ending: Ending | None = None, state: str = "HEALTHY") -> None:
    value = FleetView(NOW - age, states={"decode-r0-0": state}, ending=ending)
    write_json(run.attempt(1).fleet_file, msgspec.to_builtins(value))


def heartbeat(run: RunDirectory, process: ProcessReport) -> None:
    """Write the heartbeat of node 0, which has the agent of rank 1."""
    assignment = AssignmentRecord(1, {0: AssignedAgent(1, "n001")})
    report = AgentReport(1, "n001", "10.0.0.1", NOW, agent_pid=1, processes={"decode-r0-0": process})
    write_json(run.attempt(1).assignment_file, msgspec.to_builtins(assignment))
    write_json(run.attempt(1).agent_file(1), msgspec.to_builtins(report))


@pytest.mark.parametrize(
    ("job", "phase", "reason"),
    [
        ("PENDING (Resources)", "pending", "PENDING (Resources)"),
        ("RUNNING", "starting", ""),
        ("COMPLETING", "ending", "job COMPLETING"),
        ("NODE_FAIL", "failed", "job NODE_FAIL"),
        (None, "lost", "no heartbeat, and Slurm does not know the job"),
    ],
)
def test_phase_comes_from_slurm_before_the_first_heartbeat(
    run: RunDirectory, job: str | None, phase: str, reason: str
) -> None:
    current = status(run, job)
    assert (current.phase, current.reason) == (phase, reason)


def test_fresh_heartbeat_of_the_head_overrides_slurm(run: RunDirectory) -> None:
    fleet(run)
    assert status(run, "NODE_FAIL").phase == "running"
    fleet(run, state="LOADING")
    assert status(run, None).phase == "starting"
    fleet(run, ending=Ending(Outcome.CANCELLED, "cancelled by the user"))
    assert (status(run).phase, status(run).reason) == ("ending", "cancelled by the user")


def test_record_of_an_unresponsive_head_is_ignored(run: RunDirectory) -> None:
    fleet(run, age=61)
    current = status(run, "RUNNING")
    assert (current.phase, current.reason) == ("silent", "the head is unresponsive, but the job is RUNNING")
    assert current.active and current.silence is not None
    assert current.silence.text == "the head has not written for 1 min 1 s; this status is from then"
    assert current.roles == {"decode": {"UNKNOWN": 1}}


def test_ended_attempt_says_how_it_ended_and_whether_it_is_requeued(run: RunDirectory) -> None:
    record = EndRecord("failed", "trainer died", "t", 5, True, "", NOW)
    run.attempt(1).record_end(record)
    assert (status(run, "PENDING").phase, status(run, "PENDING").reason) == ("requeued", "trainer died; job PENDING")
    assert status(run, "PENDING").active
    held = status(run, "PENDING (launch_failed_requeued_held)").reason
    assert "Slurm holds it: `scontrol release " in held
    alone = status(run, f"PENDING (Resources, {BROKEN_UP})").reason
    assert alone.endswith("it cannot start: run `primeslurm cancel`, then `primeslurm resume`")
    run.attempt(1).record_end(EndRecord("failed", "trainer died", "t", 5, False, "this was attempt 1 of 1", NOW))
    assert status(run).reason == "trainer died; this was attempt 1 of 1"
    assert not status(run).active


def test_job_cancelled_before_its_start_is_cancelled(run: RunDirectory) -> None:
    assert status(run, "CANCELLED").phase == "failed"  # cancelled by another user
    run.attempt(1).cancel_file.write_text("")
    current = status(run, "CANCELLED")
    assert (current.phase, current.reason) == ("cancelled", "cancelled by the user")
    assert status(run, "PENDING (Resources)").phase == "pending"
    assert status(run, "NODE_FAIL").phase == "failed"


@pytest.mark.parametrize(
    ("job", "phase"),
    [("PENDING (BeginTime)", "requeued"), ("COMPLETING", "ending"), ("CANCELLED", "cancelled"), (None, "cancelled")],
)
def test_slurm_state_tells_a_requeue_from_a_cancel(run: RunDirectory, job: str | None, phase: str) -> None:
    run.attempt(1).record_end(EndRecord("cancelled", "SIGTERM", "", 5, False, "", NOW))
    assert status(run, job).phase == phase


def test_processes_progress_and_metrics_are_shown(run: RunDirectory) -> None:
    fleet(run)
    process = ProcessReport("ready", pid=42, restarts=2)
    heartbeat(run, process)
    write_json(run.attempt(1).path / "state" / "orchestrator.json", {"step": 3, "version": 2})
    (run.path / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.5}\n{"step": 3')
    directory = checkpoints.step_dir(run.path, 2)
    directory.mkdir(parents=True)
    checkpoints.commit(directory, 2, 1)
    current = status(run, processes=True)
    assert (current.step, current.version, current.committed_step, current.max_steps) == (3, 2, 2, 9)
    assert current.metrics == {"step": 2, "reward/mean": 0.5}
    assert [(p.name, p.node, p.state, p.pid, p.restarts) for p in current.processes] == [
        ("decode-r0-0", "n001", "HEALTHY", 42, 2)
    ]
    assert current.roles == {"decode": {"HEALTHY": 1}}
    assert status(run).processes == [] and status(run).unhealthy == []


def test_there_is_no_progress_before_a_state_file(run: RunDirectory) -> None:
    state = run.attempt(1).path / "state" / "orchestrator.json"
    for text in (None, '{"step": 1', '{"step": "one"}'):
        if text is not None:
            state.write_text(text)
        current = status(run)
        assert (current.step, current.version, msgspec.to_builtins(current)["progress"]) == (None, None, {})


def test_loading_engine_is_a_start_only_before_the_first_step(run: RunDirectory) -> None:
    fleet(run, state="LOADING")
    assert status(run).phase == "starting"
    write_json(run.attempt(1).path / "state" / "orchestrator.json", {"step": 0, "version": 0})
    assert status(run).phase == "running"


def test_unhealthy_processes_are_listed_with_their_nodes(run: RunDirectory) -> None:
    fleet(run, state="RESTARTING")
    process = ProcessReport("backoff", restarts=2)
    heartbeat(run, process)
    (ill,) = status(run).unhealthy
    assert (ill.name, ill.node, ill.state, ill.restarts) == ("decode-r0-0", "n001", "RESTARTING", 2)


def test_replicas_have_loads_and_late_engines_are_listed(run: RunDirectory) -> None:
    fleet(run)
    plan = run.attempt(1).plan()
    replica = Replica(index=0, router="router-0", engines=("decode-r0-0",), nodes=(0,))
    run.attempt(1).plan_file.write_text(plan.model_copy(update={"replicas": (replica,)}).to_json())
    engines = {"decode-r0-0": {"state": "CURRENT"}, "decode-r0-1": {"state": "STALE"}}
    load = {"decode": {"engines": 1, "running": 3.0, "kv_usage": 0.5}}
    write_json(
        run.attempt(1).path / "state" / "orchestrator.json", {"step": 1, "engines": engines, "replicas": {"0": load}}
    )
    current = status(run)
    (shown,) = current.replicas
    assert (shown.router, shown.engines, shown.healthy, shown.loads["decode"].running) == ("STARTING", 1, 1, 3.0)
    assert current.progress == RlProgress(step=1, late_engines={"decode-r0-1": EngineRecord("STALE")})
    assert not {"engines", "replicas"} & msgspec.to_builtins(current.progress).keys()


def test_history_elapsed_time_and_eta(run: RunDirectory) -> None:
    fleet(run)
    rows = [{"step": i, "reward/mean": i / 10, "throughput/step_seconds": 20.0} for i in range(1, 5)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(run.attempt(1).path / "state" / "orchestrator.json", {"step": 4})
    started = {"time": NOW - 90, "process": "agent-0", "kind": "agent_started"}
    (run.attempt(1).path / "events" / "agent-0.jsonl").write_text(json.dumps(started) + "\n")
    current = status(run)
    assert current.history == {"reward/mean": [0.1, 0.2, 0.3, 0.4], "staleness/mean": []}
    assert (current.elapsed_s, current.eta_s) == (90.0, 100.0)
    run.attempt(1).record_end(EndRecord("completed", "", "", 4, False, "", NOW - 10))
    assert (status(run).elapsed_s, status(run).eta_s) == (80.0, None)


def test_summary_compares_first_and_last_steps(run: RunDirectory) -> None:
    rows = [{"step": i, "reward/mean": i / 10, "rollouts/mixed_version": 1, "time": NOW} for i in range(1, 11)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = run.attempt(1).path / "events" / "agent-0.jsonl"
    events.write_text(json.dumps({"time": NOW + 60, "kind": "started", "name": "x", "restarts": 1}) + "\n")
    results = summarise(run)
    assert (results.first_reward, results.last_reward, results.gain) == pytest.approx((0.3, 0.8, 0.5))
    assert (results.mixed_version_rollouts, results.engine_restarts, results.seconds) == (10, 1, 60)


@pytest.mark.parametrize(("steps", "ends"), [(0, (None, None)), (1, (1.0, 1.0)), (3, (1.0, 3.0)), (4, (1.5, 3.5))])
def test_summary_of_a_short_run_compares_its_halves(
    run: RunDirectory, steps: int, ends: tuple[float | None, float | None]
) -> None:
    rows = [{"step": i, "reward/mean": float(i), "trainer/loss": i + 1.0} for i in range(1, steps + 1)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = summarise(run)
    assert (results.first_reward, results.last_reward) == ends
    assert results.first_loss == (None if ends[0] is None else ends[0] + 1)


def test_summary_adds_up_gpu_hours_by_role(run: RunDirectory) -> None:
    rows = [
        {"step": 1, "trainer/gpu_hours": 1.0, "trainer/idle_fraction": 0.5, "throughput/first_step_seconds": 99.0},
        {"step": 2, "trainer/gpu_hours": 3.0, "trainer/idle_fraction": 0.1, "trainer/mfu": 0.25},
        {"step": 3, "engines/decode/gpu_hours": 8.0, "engines/decode/idle_fraction": 0.2, "trainer/mfu": 0.35},
        {"step": 3, "throughput/first_step_seconds": 5.0},
    ]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summarise(run).gpu_hours == {}, "the site has no GPUs"
    plan = run.attempt(1).plan_file
    write_json(plan, read_json(plan) | {"device": "cuda"})
    found = summarise(run)
    assert found.gpu_hours == {"trainer": 4.0, "decode": 8.0}
    assert found.idle_fraction == pytest.approx({"trainer": (0.5 + 0.3) / 4, "decode": 0.2})
    assert found.mfu == pytest.approx(0.3) and found.first_step_seconds == 99.0


def test_summary_counts_failed_rollouts_of_all_attempts(run: RunDirectory) -> None:
    def failed(environment: str, error: str) -> dict[str, Any]:
        return {"time": NOW, "kind": "rollout_failed", "job": "j", "environment": environment, "error": error}

    happened = [failed("swe", f"SandboxError: no disk on n{node}") for node in range(5)]
    happened += [failed("swe", "TimeoutError"), failed("math", "KeyError: 'a'")]
    for environment in ("swe", "deadly"):
        given_up = {"kind": "task_given_up", "environment": environment, "example": 7, "reason": "workers died"}
        happened.append({"time": NOW, **given_up})
    events = run.attempt(1).path / "events" / "orchestrator.jsonl"
    events.write_text("".join(json.dumps(each) + "\n" for each in happened))
    assert summarise(run).failures == {
        "swe": FailedRollouts(6, 5, "SandboxError: no disk on n4", 1),
        "math": FailedRollouts(1, 1, "KeyError: 'a'"),
        "deadly": FailedRollouts(0, 0, "workers died", 1),
    }


def test_summary_counts_dropped_rollouts_and_keeps_missing_kl(run: RunDirectory) -> None:
    dropped, kls = (3, 0, 4), (0.001, float("nan"), -0.002)
    rows = [
        {"step": i, "time": NOW, "rollouts/dropped_stale": stale, "trainer/mismatch_kl": kl}
        for i, (stale, kl) in enumerate(zip(dropped, kls, strict=True))
    ]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (summarise(run).dropped_stale, summarise(run).mismatch_kl_max) == (7, inf)
    (run.path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[2]) + "\n")
    assert summarise(run).mismatch_kl_max == 0.002


def test_sft_run_has_loss_and_eta(run: RunDirectory) -> None:
    plan = run.attempt(1).plan().model_copy(update={"task": "sft"})
    run.attempt(1).plan_file.write_text(plan.to_json())
    write_json(run.path / "recipe.resolved.json", {"max_steps": 9, "task": "sft"})
    fleet(run)
    write_json(run.attempt(1).path / "state" / "trainer-rank-0.json", {"step": 4, "phase": "optimizer"})
    sft_values = {"tokens_per_s": 50.0, "seconds/forward_backward": 8.0, "seconds/optimizer": 2.0}
    rows = [{"step": i, "time": NOW, "loss": 4.0 - i / 2, **sft_values} for i in range(1, 5)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo')
    current = status(run)
    assert (current.phase, current.step, current.eta_s) == ("running", 4, 50.0)
    assert (current.metrics["step"], current.metrics["trainer/loss"], current.metrics["trainer/tokens_per_s"]) == (
        4,
        2,
        50,
    )
    assert current.history == {"trainer/loss": [3.5, 3.0, 2.5, 2.0]}
    achieved = summarise(run)
    assert (achieved.task, achieved.steps, achieved.first_loss, achieved.last_loss) == ("sft", 4, 3.25, 2.25)
    assert achieved.trained_tokens_per_s == 50.0


def test_runs_without_attempts_or_with_damaged_plans_are_run_errors(tmp_path: Path, run: RunDirectory) -> None:
    with pytest.raises(RunError, match="has no attempt"):
        RunDirectory(tmp_path / "none").latest()
    run.attempt(1).plan_file.write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        run.attempt(1).plan()


def test_names_in_use_are_detected(tmp_path: Path, run: RunDirectory) -> None:
    assert name_in_use(tmp_path / "fresh") == []
    assert [v.value for v in name_in_use(run.path)] == ["r"]


def test_one_of_two_simultaneous_submissions_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_recipe(tmp_path / "r.yaml")
    recipe, both = load_recipe(path), Barrier(2)
    plan = derive(recipe, site(), tmp_path / "runs" / "twice")

    def look(run_dir: Path) -> list[Violation]:
        problems = name_in_use(run_dir)
        both.wait(600)
        return problems

    def submit(_: int) -> str:
        try:
            return str(create(recipe, plan, path).number)
        except UsageError as error:
            return str(error)

    monkeypatch.setattr("primeslurm.run.directory.name_in_use", look)
    with ThreadPoolExecutor(2) as threads:
        first, second = sorted(threads.map(submit, range(2)))
    assert first == "1" and "is in use" in second


def test_missing_metrics_have_no_rows(tmp_path: Path) -> None:
    assert recent_rows(tmp_path / "none") == []
    (tmp_path / "bad").write_text('x\n[1]\n{"step": 1')
    assert recent_rows(tmp_path / "bad") == []


def test_excluded_nodes_of_a_pending_job_are_listed(run: RunDirectory) -> None:
    bad = BadNode("n8", "silent for 90 s", "other", 3, NOW - 60, NOW + 3600)
    write_excluded(run.path, [bad])
    current = status(run, "PENDING (Resources)")
    assert (current.phase, current.excluded) == ("pending", [bad])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(current))
    shown = console.export_text()
    assert "avoids n8 until 1970-01-01" in shown and "silent for 90 s (run other)" in shown


def test_full_file_system_is_reported_with_and_without_the_head(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(run, "RUNNING").waits_for == ""
    write_json(run.attempt(1).fleet_file, msgspec.to_builtins(FleetView(NOW, waits_for="0.10 GiB free")))
    assert status(run).waits_for == "0.10 GiB free"
    fleet(run, age=3600)
    monkeypatch.setattr(durable, "free_bytes", lambda _: 0)
    assert status(run, "RUNNING").waits_for.startswith(f"0.00 GiB free in {run.path}")
    monkeypatch.undo()
    assert durable.fill_reserve(run.path) and status(run, "RUNNING").waits_for == ""
    assert files.release_reserve(run.path) and status(run, "RUNNING").waits_for == durable.RESERVE_RELEASED


@pytest.mark.parametrize(("state", "number"), [("PENDING (Resources)", 1), ("RUNNING", 0)])
def test_obstacles_are_those_of_a_pending_job(run: RunDirectory, state: str, number: int) -> None:
    run.latest().record_job(JobRecord("7", "slurm", 1000.0))
    obstacle = Obstacle("train", "PartitionTimeLimit", "asks for more time", "a shorter slurm.time")
    current = read_status(run, lambda job: state, find_obstacles=lambda job: [obstacle])
    assert len(current.obstacles) == number
