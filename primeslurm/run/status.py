"""What a run is doing, read from its directory and, for jobs that have not started or have gone, from Slurm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from primeslurm.plan.model import Plan
from primeslurm.run.directory import Attempt, EndRecord, JobRecord, RunDirectory
from primeslurm.wire import checkpoints
from primeslurm.wire.files import read_json

SILENT_S = 60.0
"""A head that has not written for this long is not believed to be alive."""

JobQuery = Callable[[JobRecord], str | None]
"""Slurm's word for a job's state, with its reason while pending; None if Slurm does not know the job."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process."""

    name: str
    role: str
    node: str
    state: str
    pid: int | None
    restarts: int
    replica: int | None = None


class RunStatus(msgspec.Struct, frozen=True):
    """A run at one moment; what `primeslurm status --json` prints."""

    run: str
    run_id: str
    directory: str
    task: str
    attempt: int
    job_id: str | None
    phase: str
    """pending, starting, running, ending, completed, preempted, failed, cancelled, or lost (no sign of life)."""
    reason: str
    max_steps: int
    committed_step: int | None
    step: int | None = None
    version: int | None = None
    progress: dict[str, Any] = {}
    """The orchestrator's (or, for SFT, the trainer's) own state."""
    metrics: dict[str, Any] = {}
    """The newest row of metrics.jsonl."""
    processes: list[ProcessStatus] = []
    advice: list[str] = []

    @property
    def active(self) -> bool:
        """Whether there is something left to wait for."""
        return self.phase in ("pending", "starting", "running", "ending", "requeued")


def read_status(run: RunDirectory, job_state: JobQuery, now: float | None = None) -> RunStatus:
    """The status of the newest attempt. Raises RunError if there is none."""
    now = time.time() if now is None else now
    attempt = run.latest()
    plan = attempt.plan()
    job, end = attempt.job(), attempt.end()
    fleet = read_json(attempt.fleet_file) or {}
    phase, reason = _phase(fleet, end, job, job_state, now)
    progress = attempt.state("orchestrator" if plan.task == "rl" else "trainer-rank-0")
    metrics = last_row(run.path / "metrics.jsonl")
    return RunStatus(
        run=run.name,
        run_id=run.run_id,
        directory=str(run.path),
        task=plan.task,
        attempt=attempt.number,
        job_id=job.job_id if job else None,
        phase=phase,
        reason=reason,
        max_steps=_max_steps(run.path),
        committed_step=checkpoints.newest(run.path),
        step=progress.get("step"),
        version=progress.get("version"),
        progress=progress,
        metrics=metrics,
        processes=_processes(plan, attempt, fleet),
        advice=advice(progress),
    )


def _phase(
    fleet: dict[str, Any], end: EndRecord | None, job: JobRecord | None, job_state: JobQuery, now: float
) -> tuple[str, str]:
    """Events and heartbeats first, then Slurm."""
    if end is not None and not end.requeued:
        why = f"; {end.why_not_requeued}" if end.why_not_requeued else ""
        return end.outcome, end.reason + why
    if end is not None:
        state = job_state(job) if job else None
        return ("requeued", f"{end.reason}; job {state or 'starts again'}")
    if fleet and now - fleet["time"] < SILENT_S:
        if ending := fleet.get("ending"):
            return "ending", ending["reason"]
        loading = any(state in ("STARTING", "LOADING") for state in fleet.get("states", {}).values())
        return ("starting", "") if loading else ("running", "")
    state = job_state(job) if job else None
    if state is None:
        return "lost", "no sign of life, and no such job"
    if state.startswith(("PENDING", "CONFIGURING")):
        return "pending", state
    if state.startswith("RUNNING"):
        return ("lost", f"head silent, but the job is {state}") if fleet else ("starting", "")
    return "failed", f"job {state}"


def _processes(plan: Plan, attempt: Attempt, fleet: dict[str, Any]) -> list[ProcessStatus]:
    states = fleet.get("states", {})
    seats = attempt.roster().seats
    found = []
    for node in plan.nodes:
        seat = seats.get(node.index)
        report = (read_json(attempt.agent_file(seat.rank)) if seat else None) or {}
        for process in node.processes:
            own = report.get("processes", {}).get(process.name, {})
            found.append(
                ProcessStatus(
                    name=process.name,
                    role=process.role,
                    node=seat.name if seat else f"node {node.index}",
                    state=states.get(process.name, "STARTING"),
                    pid=own.get("pid"),
                    restarts=own.get("restarts", 0),
                    replica=process.replica,
                )
            )
    return found


def by_role(processes: list[ProcessStatus]) -> dict[str, Counter[str]]:
    """Role to how many of its processes are in which state."""
    table: dict[str, Counter[str]] = {}
    for process in processes:
        table.setdefault(process.role, Counter())[process.state] += 1
    return table


def advice(progress: dict[str, Any]) -> list[str]:
    """What the queue depths of prefill and decode suggest."""
    roles = progress.get("roles") or {}
    prefill, decode = roles.get("prefill"), roles.get("decode")
    if not prefill or not decode:
        return []
    if prefill.get("waiting", 0) > 2 * max(prefill.get("running", 0), 1) and decode.get("kv_usage", 0) < 0.5:
        return ["prefill is saturated while decode has room: more prefill nodes, or fewer decode nodes, would help"]
    if decode.get("kv_usage", 0) > 0.9 and prefill.get("running", 0) + prefill.get("waiting", 0) == 0:
        return ["decode is out of KV space while prefill is idle: more decode or fewer prefill nodes would help"]
    return []


def last_row(path: Path) -> dict[str, Any]:
    """The last complete line of a JSONL file; empty if there is none."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, 2)
            handle.seek(max(0, handle.tell() - 65536))
            lines = handle.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def _max_steps(run_dir: Path) -> int:
    recipe = read_json(run_dir / "recipe.resolved.json") or {}
    return int(recipe.get("max_steps", 0))
