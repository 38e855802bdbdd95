"""One line about a run for lists of many runs. It reads a few small files, and neither the plan nor heartbeats."""

from __future__ import annotations

from typing import Literal

import msgspec

from primeslurm.records.fleet import FleetView
from primeslurm.records.metrics import FILE, recent_rows
from primeslurm.records.state import OrchestratorState
from primeslurm.run.diagnosis.validity import problems
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import progress_of
from primeslurm.run.status.liveness import SILENT_S, HeadSilence, unresponsive_writers
from primeslurm.run.status.run_status import ACTIVE, FINE, JobQuery, phase_and_reason

# Bytes of metrics.jsonl that are read.
TAIL_BYTES = 16 * 1024

Health = Literal["ok", "warning", "error"]


class RunOverview(msgspec.Struct, frozen=True):
    """State, progress and health of a run."""

    run: str
    task: str
    created_at: float  # Unix time; 0 if unknown
    attempt: int
    job_id: str | None
    phase: str  # as `RunStatus.phase`
    reason: str
    step: int | None
    max_steps: int
    reward: float | None = None  # mean of the newest step's batch
    loss: float | None = None
    seconds_per_step: float | None = None
    tokens_per_s: float | None = None
    updated_at: float = 0.0  # Unix time of the newest step, or of the attempt's end; 0 before the first step
    health: Health = "ok"
    problem: str = ""  # why `health` is not ok

    @property
    def active(self) -> bool:
        return self.phase in ACTIVE


def read_overview(run: RunDirectory, job_state: JobQuery, now: float, recheck_s: float = 0.0) -> RunOverview:
    """Return the overview of the newest attempt at Unix time `now`. Raises RunError if no attempt has a plan.

    The head's file is watched for `recheck_s` seconds if it looks old.
    """
    attempt, recipe, lock = run.latest(), run.recipe(), run.lock()
    job, end, fleet = attempt.job(), attempt.end(), attempt.fleet()
    silence = _silence(attempt, fleet, now, recheck_s) if fleet and not end else None
    progress = progress_of(attempt, recipe.task)
    begun = progress is not None and progress.begun
    phase, reason = phase_and_reason(fleet, silence, end, job, job_state, begun, attempt.cancel_file)
    rows = recent_rows(run.path / FILE, TAIL_BYTES)
    row = rows[-1] if rows else {}
    step = progress.step if progress and progress.step is not None else row.get("step")
    dropped = progress.counts.get("rollouts_dropped_stale", 0) if isinstance(progress, OrchestratorState) else 0
    invalid = problems(rows, dropped, recipe.batch_size)
    health, problem = _health(phase, reason, fleet, silence.text if silence else "", invalid)
    return RunOverview(
        run=run.name,
        task=recipe.task,
        created_at=lock.created_at,
        attempt=attempt.number,
        job_id=(job.job_id or None) if job else None,
        phase=phase,
        reason=reason,
        step=None if step is None else int(step),
        max_steps=recipe.max_steps,
        reward=row.get("reward/mean"),
        loss=row.get("trainer/loss"),
        seconds_per_step=row.get("throughput/step_seconds"),
        tokens_per_s=row.get("throughput/tokens_per_s", row.get("trainer/tokens_per_s")),
        updated_at=max(row.get("time", 0.0), end.time if end else 0.0),
        health=health,
        problem=problem,
    )


def _silence(attempt: Attempt, fleet: FleetView, now: float, recheck_s: float) -> HeadSilence | None:
    # Only the head's file is read: of a lost run with a thousand nodes, `check_liveness` reads a thousand heartbeats.
    path = attempt.fleet_file
    silent = unresponsive_writers({path: fleet.time}, now, recheck_s, SILENT_S * fleet.heartbeat_s)
    return HeadSilence("the head is unresponsive", silent[path]) if path in silent else None


def _health(phase: str, reason: str, fleet: FleetView | None, silence: str, invalid: list[str]) -> tuple[Health, str]:
    if phase in ("failed", "lost"):
        return "error", reason
    if invalid:
        return "error", invalid[0]
    if phase not in ACTIVE or fleet is None:
        return "ok", ""
    if silence:
        return "error", silence
    if fleet.waits_for:
        return "warning", fleet.waits_for
    unhealthy = sum(state not in FINE for state in fleet.states.values())
    if unhealthy:
        return "warning", f"{unhealthy} of {len(fleet.states)} processes are not healthy"
    return "ok", ""
