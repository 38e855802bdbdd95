"""Status of a run, read from its directory and, if the head is unresponsive or has not started, from Slurm.

Only a few files are read, however large the run: fleet.json has the state of every process. Heartbeats of single nodes
are read only for unhealthy processes, or if the caller asks for all processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean

import msgspec

from primeslurm.base import files
from primeslurm.base.durable import RESERVE_BYTES, RESERVE_RELEASED, describe_shortage, reserve_released
from primeslurm.records.attempt import EndRecord, JobRecord, Obstacle
from primeslurm.records.fleet import AgentReport, FleetView, HeartbeatReport
from primeslurm.records.metrics import Row, recent_rows
from primeslurm.records.state import EngineRecord, Load, OrchestratorState, ReplicaLoad, RolloutProgress, TrainerState
from primeslurm.run.bad_nodes import BadNode, excluded
from primeslurm.run.directory import BY_SIGTERM, Attempt, RunDirectory
from primeslurm.run.history import first_event, progress_of, recent_events
from primeslurm.run.status.advice import Advice, advise, tunables_of
from primeslurm.run.status.event_text import EventText, newest_texts, notable
from primeslurm.run.status.liveness import (
    RECHECK_S,
    FindCauses,
    HeadSilence,
    RunLiveness,
    check_liveness,
    state_from_agent,
    unresponsive_nodes,
)
from primeslurm.run.status.plan_outline import PlanOutline, ProcessOutline, read_outline
from primeslurm.wire.stored import checkpoints

# Steps in `RunStatus.history`.
HISTORY = 60
# Events in `RunStatus.events`.
RECENT = 8
# Newest steps that the estimate of the remaining time averages.
PACE = 10
FINE = ("HEALTHY", "DONE", "STARTING", "LOADING")
# Most processes in `RunStatus.unhealthy`.
MAX_UNHEALTHY = 256

# Returns Slurm's state of a job, with the reason while it is pending; None if Slurm does not know the job.
JobQuery = Callable[[JobRecord], str | None]
# Returns the reasons why a pending job does not start unless somebody acts.
FindObstacles = Callable[[JobRecord], list[Obstacle]]
# Result of a `JobQuery` if Slurm does not answer.
NO_ANSWER = "NO ANSWER"
# Reason in a `JobQuery` of a pending heterogeneous job that can never start.
BROKEN_UP = "others of its components have ended"
# Start of a cause that comes from the output of srun.
SRUN_REPORTS = "srun reports"
# Start of the result of a `JobQuery` while a submission is in progress and the job has no id.
SUBMITTING = "SUBMITTING"
# Slurm's states of a job that has started and has not ended.
ALIVE = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
# Phases of a run that has not ended.
ACTIVE = ("pending", "starting", "running", "silent", "ending", "requeued")
# Shown beside the numbers of an emulated run.
EMULATED = "emulated: stand-ins made up all rewards, losses and speeds"


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process."""

    name: str
    role: str
    node: str
    state: str
    pid: int | None
    restarts: int
    replica: int | None = None
    since: float | None = None  # Unix time of the last heartbeat of its node, if the state is UNKNOWN or SUSPECT
    silent: str = ""  # age and phase of its last heartbeat, if it is unresponsive


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One inference deployment."""

    index: int
    router: str  # state of the router
    engines: int
    healthy: int
    loads: dict[str, Load] = {}  # engine load by role
    share: ReplicaLoad | None = None  # its rollouts, if adaptive concurrency sets their number


class NoProgress(msgspec.Struct, frozen=True):
    """Placeholder before the orchestrator or trainer has written its state."""


class RlProgress(RolloutProgress, frozen=True, kw_only=True):
    """The orchestrator's state, reduced to the engines whose weights are not current."""

    late_engines: dict[str, EngineRecord] = {}


class RunStatus(msgspec.Struct, frozen=True):
    """Status of a run, as `primeslurm status --json` prints it."""

    run: str
    run_id: str
    directory: str
    task: str
    attempt: int
    job_id: str | None
    phase: str
    """pending, starting, running, silent (the head is unresponsive), ending, requeued, completed, preempted, failed,
    cancelled, or lost (the head is unresponsive and there is no job)."""
    reason: str
    max_steps: int
    committed_step: int | None
    step: int | None = None
    version: int | None = None
    elapsed_s: float | None = None  # seconds from the attempt's first event until now or its end
    eta_s: float | None = None  # estimated seconds until the last step
    progress: RlProgress | TrainerState | NoProgress = NoProgress()
    """State of the orchestrator, or of the trainer for SFT."""
    metrics: Row = {}  # Newest row of metrics.jsonl. SFT rows use the metric names of RL.
    history: dict[str, list[float]] = {}  # reward and staleness (SFT: loss) of the last steps, oldest first
    roles: dict[str, dict[str, int]] = {}  # role to process state to number of processes
    replicas: list[ReplicaStatus] = []
    unhealthy: list[ProcessStatus] = []  # processes that are neither healthy nor starting; at most 256
    processes: list[ProcessStatus] = []  # all processes, if the caller asked for them
    events: list[EventText] = []  # recent events, oldest first
    advice: list[Advice] = []
    waits_for: str = ""  # fault of the shared file system that pauses the run; empty if there is none
    damaged: list[str] = []  # damaged checkpoints that were moved aside, and why
    excluded: list[BadNode] = []  # bad nodes that the job excludes, without the nodes that the recipe excludes
    obstacles: list[Obstacle] = []  # reasons why the pending job does not start, with fixes
    silence: HeadSilence | None = None  # the unresponsive head, if the status is out of date
    emulated: bool = False  # all numbers come from stand-ins for engines, trainer and environments

    @property
    def active(self) -> bool:
        """True if the run has not ended."""
        return self.phase in ACTIVE


def read_status(
    run: RunDirectory,
    job_state: JobQuery,
    now: float | None = None,
    processes: bool = False,
    find_causes: FindCauses = lambda attempt, nodes: [],
    recheck_s: float = RECHECK_S,
    find_obstacles: FindObstacles = lambda job: [],
) -> RunStatus:
    """Return the status of the newest attempt.

    Args:
        processes: list all processes, not only unhealthy ones.
        recheck_s: seconds to watch a file that looks old.

    Raises:
        RunError: the run has no attempt with a readable plan.
    """
    now = time.time() if now is None else now
    attempt = run.latest()
    outline = read_outline(attempt)
    job, end = attempt.job(), attempt.end()
    fleet = attempt.fleet()
    ended = end is not None
    liveness = RunLiveness()
    if not ended:
        liveness = check_liveness(attempt, fleet, now, find_causes=find_causes, recheck_s=recheck_s)
    states = _states(outline, attempt, fleet, liveness, ended=ended)
    silent = fleet.silent if fleet and liveness.silence is None else {}
    progress = progress_of(attempt, outline.task)
    begun = progress is not None and progress.begun
    phase, reason = phase_and_reason(fleet, liveness.silence, end, job, job_state, begun, attempt.cancel_file)
    orchestrator = progress if isinstance(progress, OrchestratorState) else None
    steps = recent_rows(run.path / "metrics.jsonl")
    recipe = run.recipe()
    max_steps, step = recipe.max_steps, progress.step if progress else None
    return RunStatus(
        run=run.name,
        run_id=run.run_id,
        directory=str(run.path),
        task=outline.task,
        attempt=attempt.number,
        job_id=(job.job_id or None) if job else None,
        phase=phase,
        reason=reason,
        max_steps=max_steps,
        committed_step=checkpoints.newest(run.path),
        step=step,
        version=progress.version if progress else None,
        elapsed_s=_elapsed(attempt, end.time if end else now),
        eta_s=_eta(steps, step, max_steps) if phase == "running" else None,
        progress=_shown_progress(progress),
        metrics=(steps or [{}])[-1],
        history={
            name: [row[name] for row in steps[-HISTORY:] if name in row] for name in _HISTORY.get(outline.task, ())
        },
        roles=_by_role(outline, states),
        replicas=_replicas(outline, states, orchestrator or OrchestratorState()),
        unhealthy=_unhealthy(outline, attempt, states, silent) if end is None else [],
        processes=_describe(outline.processes(), attempt, states, silent) if processes else [],
        events=newest_texts(notable(recent_events(attempt)), RECENT),
        waits_for=_shortage(run, None if liveness.silence else fleet) if end is None or end.requeued else "",
        damaged=checkpoints.set_asides(run.path),
        excluded=excluded(run.path) if end is None or end.requeued else [],
        advice=advise(orchestrator.roles, tunables_of(recipe), orchestrator.shares.values())
        if orchestrator and phase == "running"
        else [],
        obstacles=find_obstacles(job) if job is not None and phase in ("pending", "requeued") else [],
        emulated=outline.emulated,
        silence=liveness.silence if phase in ("silent", "lost") else None,
    )


_HISTORY = {"rl": ("reward/mean", "staleness/mean"), "sft": ("trainer/loss",)}


def phase_and_reason(
    fleet: FleetView | None,
    silence: HeadSilence | None,
    end: EndRecord | None,
    job: JobRecord | None,
    job_state: JobQuery,
    begun: bool,
    cancel_file: Path,
) -> tuple[str, str]:
    """Return the phase of an attempt, and why it has this phase.

    Args:
        begun: the run has made progress before, so a process that loads now is restarting.
        cancel_file: exists if the user has cancelled the attempt.
    """
    # Records of the run count first: Slurm is slow, and may not answer.
    if end is not None and end.reason == BY_SIGTERM and job:
        return _terminated(end, job, job_state(job))
    if end is not None and not end.requeued:
        why = f"; {end.why_not_requeued}" if end.why_not_requeued else ""
        return end.outcome, end.reason + why
    if end is not None:
        state = job_state(job) if job else None
        return ("requeued", f"{end.reason}; job {state or 'starts again'}{_remedy(job, state)}")
    if fleet and silence is None:
        if fleet.ending:
            return "ending", fleet.ending.reason
        loading = not begun and any(state in ("STARTING", "LOADING") for state in fleet.states.values())
        return ("starting", "") if loading else ("running", "")
    state = job_state(job) if job else None
    if state is None and job and job.submission and not job.job_id:
        return "lost", "the submission was interrupted before Slurm had the job; `primeslurm resume` submits it again"
    if state is None:
        return "lost", "no heartbeat, and Slurm does not know the job"
    if state.startswith(("PENDING", "CONFIGURING", SUBMITTING)):
        return "pending", state
    if state == NO_ANSWER:
        return "silent", ("the head is unresponsive" if silence else "no heartbeat yet") + ", and Slurm does not answer"
    if state.startswith(ALIVE):
        return ("silent", f"the head is unresponsive, but the job is {state}") if silence else ("starting", "")
    if state.startswith("COMPLETING"):  # the next state says whether Slurm requeues the job
        return "ending", f"job {state}"
    if state.startswith("CANCELLED") and files.exists(cancel_file):  # the job ended before a head could record why
        return "cancelled", "cancelled by the user"
    return "failed", f"job {state}"


def _shortage(run: RunDirectory, fleet: FleetView | None) -> str:
    reported = fleet.waits_for if fleet else ""
    return (
        reported
        or describe_shortage(run.path, RESERVE_BYTES)
        or (RESERVE_RELEASED if reserve_released(run.path) else "")
    )


def _terminated(end: EndRecord, job: JobRecord, state: str | None) -> tuple[str, str]:
    # Slurm sends the same SIGTERM for `scancel` and for a requeue after a node failure. Only the job's state tells.
    if state is not None and state.startswith("PENDING"):
        return "requeued", f"by Slurm; job {state}{_remedy(job, state)}"
    if state is not None and state.startswith(("RUNNING", "COMPLETING")):
        return "ending", f"by Slurm; job {state}"
    return end.outcome, end.reason


def _remedy(job: JobRecord | None, state: str | None) -> str:
    if job is not None and "held" in (state or ""):
        return f"; Slurm holds it: `scontrol release {job.job_id}` lets it start"
    if BROKEN_UP in (state or ""):
        return "; it cannot start: run `primeslurm cancel`, then `primeslurm resume`"
    return ""


def _elapsed(attempt: Attempt, until: float) -> float | None:
    first = first_event(attempt, "agent-0")
    return max(0.0, until - first.time) if first and first.time else None


def _eta(steps: list[Row], step: int | None, max_steps: int) -> float | None:
    paces = [row["throughput/step_seconds"] for row in steps[-PACE:] if "throughput/step_seconds" in row]
    return fmean(paces) * (max_steps - step) if paces and step is not None else None


def _states(
    outline: PlanOutline, attempt: Attempt, fleet: FleetView | None, liveness: RunLiveness, *, ended: bool
) -> Mapping[str, str]:
    # The head's states count while it is responsive. Otherwise the agents' heartbeats count, and processes of an
    # unresponsive agent are UNKNOWN.
    states = fleet.states if fleet else {}
    if ended and (fleet is None or fleet.ending is None):  # the head ended before it recorded final states
        return {process.name: _final_state(states.get(process.name, "STARTING")) for process in outline.processes()}
    if liveness.silence is None:
        return states
    assignment = attempt.assignment()
    unresponsive = unresponsive_nodes(assignment, liveness.agents)
    reports = {node: attempt.heartbeat(node, assignment) for node in assignment.agents if node not in unresponsive}
    current = {}
    for process in outline.processes():
        last, node = states.get(process.name, "STARTING"), assignment.moved.get(process.name, process.node)
        report = reports.get(node)
        if report is None:
            current[process.name] = _final_state(last)
        else:
            record = report.processes.get(process.name)
            current[process.name] = state_from_agent(last, record.state if record else None)
    return current


def _final_state(last: str) -> str:
    return last if last in ("DONE", "LOST", "DEAD") else "UNKNOWN"


def _by_role(outline: PlanOutline, states: Mapping[str, str]) -> dict[str, dict[str, int]]:
    table: dict[str, Counter[str]] = {}
    for process in outline.processes():
        table.setdefault(process.role, Counter())[states.get(process.name, "STARTING")] += 1
    return {role: dict(counts) for role, counts in table.items()}


def _replicas(outline: PlanOutline, states: Mapping[str, str], orchestrator: OrchestratorState) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(
            index=replica.index,
            router=states.get(replica.router, "STARTING"),
            engines=len(replica.engines),
            healthy=sum(states.get(engine) == "HEALTHY" for engine in replica.engines),
            loads=orchestrator.replicas.get(str(replica.index), {}),
            share=orchestrator.shares.get(str(replica.index)),
        )
        for replica in outline.replicas
    ]


def _shown_progress(
    progress: OrchestratorState | TrainerState | None,
) -> RlProgress | TrainerState | NoProgress:
    if not isinstance(progress, OrchestratorState):
        return progress or NoProgress()
    late = {name: engine for name, engine in progress.engines.items() if engine.state != "CURRENT"}
    shared = {field: getattr(progress, field) for field in RolloutProgress.__struct_fields__}
    return RlProgress(**shared, late_engines=late)


def _unhealthy(
    outline: PlanOutline, attempt: Attempt, states: Mapping[str, str], silent: Mapping[str, HeartbeatReport]
) -> list[ProcessStatus]:
    unhealthy = (process for process in outline.processes() if states.get(process.name, "STARTING") not in FINE)
    return _describe(
        [process for _, process in zip(range(MAX_UNHEALTHY), unhealthy, strict=False)], attempt, states, silent
    )


def _describe(
    processes: Iterable[ProcessOutline],
    attempt: Attempt,
    states: Mapping[str, str],
    silent: Mapping[str, HeartbeatReport],
) -> list[ProcessStatus]:
    assignment = attempt.assignment()
    reports: dict[int, AgentReport | None] = {}
    described = []
    for process in processes:
        node = assignment.moved.get(process.name, process.node)
        if node not in reports:
            reports[node] = attempt.heartbeat(node, assignment)
        report = reports[node]
        record = report.processes.get(process.name) if report else None
        state = states.get(process.name, "STARTING")
        described.append(
            ProcessStatus(
                name=process.name,
                role=process.role,
                node=report.name if report else f"node {node}",
                state=state,
                pid=record.pid if record else None,
                restarts=record.restarts if record else 0,
                replica=process.replica,
                since=report.time if report and state in ("UNKNOWN", "SUSPECT") else None,
                silent=silent[process.name].text if process.name in silent else "",
            )
        )
    return described
