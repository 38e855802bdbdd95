"""What a run is doing, read from its directory and, for jobs that have not started or have gone, from Slurm.

However large the run, this opens a handful of files: the head already knows the state of every process. Files of single
nodes are read only for what is not well, or when asked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean

import msgspec

from primeslurm import files
from primeslurm.records.attempt import EndRecord, JobRecord, Obstacle
from primeslurm.records.fleet import AgentReport, BeatReport, FleetView
from primeslurm.records.metrics import Row, recent_rows
from primeslurm.records.reserve import GIVEN_UP, RESERVE_BYTES, Reserve, shortage
from primeslurm.records.state import EngineRecord, Load, OrchestratorState, ReplicaLoad, RolloutProgress, TrainerState
from primeslurm.run.diagnosis.advice import Advice, advise, tunables_of
from primeslurm.run.directory import BY_SIGTERM, Attempt, RunDirectory
from primeslurm.run.exclusion import excluded
from primeslurm.run.ledger import BadNode
from primeslurm.run.records import first_event, progress_of, recent_events
from primeslurm.run.status.event_text import EventText, lately, notable
from primeslurm.run.status.placement import PlacedProcess, RunPlacement, placement_of
from primeslurm.run.status.signs_of_life import (
    SECOND_LOOK_S,
    RunSilence,
    Signs,
    WhySilent,
    signs_of_life,
    state_by_agent,
    unheard_nodes,
)
from primeslurm.wire.stored import checkpoints

HISTORY = 60
"""Steps of history."""
RECENT = 8
"""Notable events shown."""
PACE = 10
"""Steps whose duration predicts that of the rest."""
FINE = ("HEALTHY", "DONE", "STARTING", "LOADING")
MAX_UNHEALTHY = 256
"""Processes listed one by one; more than so many are no list any more."""

JobQuery = Callable[[JobRecord], str | None]
"""Slurm's word for a job's state, with its reason while pending; None if Slurm does not know the job."""
WhyWaiting = Callable[[JobRecord], list[Obstacle]]
"""Says why a waiting job does not start by waiting alone."""
NO_ANSWER = "NO ANSWER"
"""What a `JobQuery` says where Slurm does not answer."""
BROKEN_UP = "others of its components have ended"
"""What a `JobQuery` says of a job that waits without them, and would for ever."""
SUBMITTING = "SUBMITTING"
"""Begins what a `JobQuery` says of a job that has no id yet, while somebody submits it."""
ALIVE = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
"""Slurm's words for a job that has begun and has not ended."""
EMULATED = "emulated: stand-ins made up all rewards, losses and speeds"
"""What is said beside the numbers of an emulated run."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process."""

    name: str
    role: str
    node: str
    state: str
    pid: int | None
    restarts: int
    replica: int | None = None
    since: float | None = None
    """Unix seconds of the last word on it, for a process of which nobody tells at present (UNKNOWN, SUSPECT)."""
    silent: str = ""
    """For how long it has been silent, and where, if it is."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One inference deployment."""

    index: int
    router: str
    """State of its router."""
    engines: int
    healthy: int
    loads: dict[str, Load] = {}
    """By role."""
    share: ReplicaLoad | None = None
    """Its rollouts, where their number follows the load of its engines."""


class NoProgress(msgspec.Struct, frozen=True):
    """Of a run whose orchestrator or trainer has not said anything yet."""


class RlProgress(RolloutProgress, frozen=True, kw_only=True):
    """The orchestrator's state without the replicas, which are told apart, and the engines that are current."""

    late_engines: dict[str, EngineRecord] = {}


class RunStatus(msgspec.Struct, frozen=True):
    """A run at one moment; what `primeslurm status --json` prints."""

    run: str
    run_id: str
    directory: str
    task: str
    attempt: int
    job_id: str | None
    phase: str
    """pending, starting, running, silent (the head does not write), ending, requeued, completed, preempted, failed,
    cancelled, or lost (no sign of life, and no job)."""
    reason: str
    max_steps: int
    committed_step: int | None
    step: int | None = None
    version: int | None = None
    elapsed_s: float | None = None
    """Since this attempt's first event, until now or its end."""
    eta_s: float | None = None
    """Until the last step, at the pace of the last ten."""
    progress: RlProgress | TrainerState | NoProgress = NoProgress()
    """The orchestrator's (or, for SFT, the trainer's) own state."""
    metrics: Row = {}
    """The newest row of metrics.jsonl; that of SFT under the names of RL."""
    history: dict[str, list[float]] = {}
    """Reward and staleness (for SFT: the loss) of the last steps, oldest first."""
    roles: dict[str, dict[str, int]] = {}
    """Role to how many of its processes are in which state."""
    replicas: list[ReplicaStatus] = []
    unhealthy: list[ProcessStatus] = []
    """Processes that are neither healthy nor just starting; at most 256."""
    processes: list[ProcessStatus] = []
    """All of them, if asked for."""
    events: list[EventText] = []
    """What happened lately, oldest first."""
    advice: list[Advice] = []
    waits_for: str = ""
    """What is wrong with the shared file system, in the head's words or as it is seen from here; the run waits."""
    damaged: list[str] = []
    """Checkpoints that were set aside, and why."""
    excluded: list[BadNode] = []
    """Nodes that its job is kept away from, why, and until when; not those that the recipe itself excludes."""
    obstacles: list[Obstacle] = []
    """Why its job does not start by waiting alone, and what to do."""
    silence: RunSilence | None = None
    """Why all of this is not of this moment; None: it is."""
    emulated: bool = False
    """Stand-ins run in place of engines, trainer and environments, so all numbers are made up."""

    @property
    def active(self) -> bool:
        """Whether there is something left to wait for."""
        return self.phase in ("pending", "starting", "running", "silent", "ending", "requeued")


def read_status(
    run: RunDirectory,
    job_state: JobQuery,
    now: float | None = None,
    processes: bool = False,
    why_silent: WhySilent = lambda attempt, nodes: [],
    second_look_s: float = SECOND_LOOK_S,
    why_waiting: WhyWaiting = lambda job: [],
) -> RunStatus:
    """Read the status of the newest attempt.

    Args:
        run: the run.
        job_state: Slurm's word for a job.
        now: Unix seconds; the present if left out.
        processes: with every single process.
        why_silent: what is known of nodes that say nothing.
        second_look_s: for how long a file that seems old is watched before its writer counts as silent.
        why_waiting: why a waiting job does not start by waiting alone.

    Raises:
        RunError: the run has no attempt with a readable plan.
    """
    now = time.time() if now is None else now
    attempt = run.latest()
    placement = placement_of(attempt)
    job, end = attempt.job(), attempt.end()
    fleet = attempt.fleet()
    over = end is not None
    signs = Signs() if over else signs_of_life(attempt, fleet, now, why_silent=why_silent, second_look_s=second_look_s)
    states = _states(placement, attempt, fleet, signs, over=over)
    silent = fleet.silent if fleet and signs.silence is None else {}
    progress = progress_of(attempt, placement.task)
    begun = progress is not None and progress.begun
    phase, reason = _phase(fleet, signs.silence, end, job, job_state, begun, attempt.cancel_file)
    orchestrator = progress if isinstance(progress, OrchestratorState) else None
    steps = recent_rows(run.path / "metrics.jsonl")
    recipe = run.recipe()
    max_steps, step = recipe.max_steps, progress.step if progress else None
    return RunStatus(
        run=run.name,
        run_id=run.run_id,
        directory=str(run.path),
        task=placement.task,
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
        progress=_without_what_is_well(progress),
        metrics=(steps or [{}])[-1],
        history=_history(placement.task, steps[-HISTORY:]),
        roles=_by_role(placement, states),
        replicas=_replicas(placement, states, orchestrator or OrchestratorState()),
        unhealthy=_unhealthy(placement, attempt, states, silent) if end is None else [],
        processes=_describe(placement.processes(), attempt, states, silent) if processes else [],
        events=lately(notable(recent_events(attempt)), RECENT),
        waits_for=_waits_for(run, None if signs.silence else fleet) if end is None or end.requeued else "",
        damaged=checkpoints.set_asides(run.path),
        excluded=excluded(run.path) if end is None or end.requeued else [],
        advice=advise(orchestrator.roles, tunables_of(recipe), orchestrator.shares.values())
        if orchestrator and phase == "running"
        else [],
        obstacles=why_waiting(job) if job is not None and phase in ("pending", "requeued") else [],
        emulated=placement.emulated,
        silence=signs.silence if phase in ("silent", "lost") else None,
    )


_HISTORY = {"rl": ("reward/mean", "staleness/mean"), "sft": ("trainer/loss",)}


def _phase(
    fleet: FleetView | None,
    silence: RunSilence | None,
    end: EndRecord | None,
    job: JobRecord | None,
    job_state: JobQuery,
    begun: bool,
    cancel_file: Path,
) -> tuple[str, str]:
    """Events and heartbeats first, then Slurm. `begun`: what is loading now is loading again."""
    if end is not None and end.reason == BY_SIGTERM and job:
        return _terminated(end, job, job_state(job))
    if end is not None and not end.requeued:
        why = f"; {end.why_not_requeued}" if end.why_not_requeued else ""
        return end.outcome, end.reason + why
    if end is not None:
        state = job_state(job) if job else None
        return ("requeued", f"{end.reason}; job {state or 'starts again'}{_way_on(job, state)}")
    if fleet and silence is None:
        if fleet.ending:
            return "ending", fleet.ending.reason
        loading = not begun and any(state in ("STARTING", "LOADING") for state in fleet.states.values())
        return ("starting", "") if loading else ("running", "")
    state = job_state(job) if job else None
    if state is None and job and job.submission and not job.job_id:
        return "lost", "its submission was interrupted before Slurm had the job; `primeslurm resume` submits it again"
    if state is None:
        return "lost", "no sign of life, and no such job"
    if state.startswith(("PENDING", "CONFIGURING", SUBMITTING)):
        return "pending", state
    if state == NO_ANSWER:
        return "silent", ("the head is silent, and " if silence else "nothing was written yet, and ") + _MUTE
    if state.startswith(ALIVE):
        return ("silent", f"head silent, but the job is {state}") if silence else ("starting", "")
    if state.startswith("COMPLETING"):  # it has ended, or Slurm requeues it: its next word says which
        return "ending", f"job {state}"
    if state.startswith("CANCELLED") and files.exists(cancel_file):  # the job ended before a head could record why
        return "cancelled", "cancelled by the user"
    return "failed", f"job {state}"


_MUTE = "Slurm does not answer"


def _waits_for(run: RunDirectory, fleet: FleetView | None) -> str:
    """The words of a head that can write them; what can be seen from here otherwise."""
    told = fleet.waits_for if fleet else ""
    return told or shortage(run.path, RESERVE_BYTES) or (GIVEN_UP if Reserve(run.path).given_up else "")


def _terminated(end: EndRecord, job: JobRecord, state: str | None) -> tuple[str, str]:
    """Slurm ended the attempt from outside: it cancels a job in the same way as it requeues one that lost a node."""
    if state is not None and state.startswith("PENDING"):
        return "requeued", f"by Slurm; job {state}{_way_on(job, state)}"
    if state is not None and state.startswith(("RUNNING", "COMPLETING")):
        return "ending", f"by Slurm; job {state}"
    return end.outcome, end.reason


def _way_on(job: JobRecord | None, state: str | None) -> str:
    """What a requeued job needs that does not start by itself; empty if it does."""
    if job is not None and "held" in (state or ""):
        return f"; Slurm holds it: `scontrol release {job.job_id}` lets it start"
    if BROKEN_UP in (state or ""):
        return "; it cannot start so: `primeslurm cancel` it, and `primeslurm resume`"
    return ""


def _elapsed(attempt: Attempt, until: float) -> float | None:
    """Since the first agent wrote its first line."""
    first = first_event(attempt, "agent-0")
    return max(0.0, until - first.time) if first and first.time else None


def _eta(steps: list[Row], step: int | None, max_steps: int) -> float | None:
    paces = [row["throughput/step_seconds"] for row in steps[-PACE:] if "throughput/step_seconds" in row]
    return fmean(paces) * (max_steps - step) if paces and step is not None else None


def _history(task: str, steps: list[Row]) -> dict[str, list[float]]:
    return {name: [row[name] for row in steps if name in row] for name in _HISTORY.get(task, ())}


def _states(
    placement: RunPlacement, attempt: Attempt, fleet: FleetView | None, signs: Signs, *, over: bool
) -> Mapping[str, str]:
    """The head's word, or, while it is silent, that of the agents; UNKNOWN where an agent is silent, too."""
    states = fleet.states if fleet else {}
    if over and (fleet is None or fleet.ending is None):  # the end is on record, but the head did not see it
        return {process.name: _unless_over(states.get(process.name, "STARTING")) for process in placement.processes()}
    if signs.silence is None:
        return states
    assignment = attempt.assignment()
    unheard = unheard_nodes(assignment, signs.agents)
    reports = {node: attempt.heartbeat(node, assignment) for node in assignment.agents if node not in unheard}
    told = {}
    for process in placement.processes():
        last, node = states.get(process.name, "STARTING"), assignment.moved.get(process.name, process.node)
        report = reports.get(node)
        if report is None:
            told[process.name] = _unless_over(last)
        else:
            own = report.processes.get(process.name)
            told[process.name] = state_by_agent(last, own.state if own else None)
    return told


def _unless_over(last: str) -> str:
    return last if last in ("DONE", "LOST", "DEAD") else "UNKNOWN"


def _by_role(placement: RunPlacement, states: Mapping[str, str]) -> dict[str, dict[str, int]]:
    table: dict[str, Counter[str]] = {}
    for process in placement.processes():
        table.setdefault(process.role, Counter())[states.get(process.name, "STARTING")] += 1
    return {role: dict(counts) for role, counts in table.items()}


def _replicas(
    placement: RunPlacement, states: Mapping[str, str], orchestrator: OrchestratorState
) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(
            index=replica.index,
            router=states.get(replica.router, "STARTING"),
            engines=len(replica.engines),
            healthy=sum(states.get(engine) == "HEALTHY" for engine in replica.engines),
            loads=orchestrator.replicas.get(str(replica.index), {}),
            share=orchestrator.shares.get(str(replica.index)),
        )
        for replica in placement.replicas
    ]


def _without_what_is_well(
    progress: OrchestratorState | TrainerState | None,
) -> RlProgress | TrainerState | NoProgress:
    if not isinstance(progress, OrchestratorState):
        return progress or NoProgress()
    late = {name: engine for name, engine in progress.engines.items() if engine.state != "CURRENT"}
    shared = {field: getattr(progress, field) for field in RolloutProgress.__struct_fields__}
    return RlProgress(**shared, late_engines=late)


def _unhealthy(
    placement: RunPlacement, attempt: Attempt, states: Mapping[str, str], silent: Mapping[str, BeatReport]
) -> list[ProcessStatus]:
    ill = (process for process in placement.processes() if states.get(process.name, "STARTING") not in FINE)
    return _describe([process for _, process in zip(range(MAX_UNHEALTHY), ill, strict=False)], attempt, states, silent)


def _describe(
    processes: Iterable[PlacedProcess], attempt: Attempt, states: Mapping[str, str], silent: Mapping[str, BeatReport]
) -> list[ProcessStatus]:
    """With what the heartbeats of their nodes say."""
    assignment = attempt.assignment()
    reports: dict[int, AgentReport | None] = {}
    found = []
    for process in processes:
        node = assignment.moved.get(process.name, process.node)
        if node not in reports:
            reports[node] = attempt.heartbeat(node, assignment)
        report = reports[node]
        own = report.processes.get(process.name) if report else None
        state = states.get(process.name, "STARTING")
        found.append(
            ProcessStatus(
                name=process.name,
                role=process.role,
                node=report.name if report else f"node {node}",
                state=state,
                pid=own.pid if own else None,
                restarts=own.restarts if own else 0,
                replica=process.replica,
                since=report.time if report and state in ("UNKNOWN", "SUSPECT") else None,
                silent=silent[process.name].words if process.name in silent else "",
            )
        )
    return found
