"""Diagnosis of an attempt: its first failure, later events, known causes, and whether the run is valid."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.base.units import duration
from primeslurm.records.attempt import JobRecord, Obstacle
from primeslurm.records.events.nodes import NodeLost
from primeslurm.records.fleet import outcome_text
from primeslurm.records.job_output import informative_lines, of_start, srun_error
from primeslurm.records.record import Event
from primeslurm.records.resolved_recipe import RunRecipe
from primeslurm.records.state import OrchestratorState
from primeslurm.run.diagnosis import failure_signatures
from primeslurm.run.diagnosis.failure_signatures import Cause
from primeslurm.run.diagnosis.failures import Failure, failures, unresponsive_processes
from primeslurm.run.diagnosis.logs import error_line, lines_until
from primeslurm.run.diagnosis.validity import MAX_KL, problems
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.history import attempt_events, dropped_rollouts, progress_of, rows
from primeslurm.run.status.advice import Advice, advise, tunables_of
from primeslurm.run.status.event_text import EventText, notable
from primeslurm.run.status.liveness import RECHECK_S, FindCauses, RunLiveness, check_liveness
from primeslurm.run.status.plan_outline import PlanOutline, read_outline
from primeslurm.run.status.run_status import ALIVE, NO_ANSWER, SRUN_REPORTS, SUBMITTING, FindObstacles
from primeslurm.wire.stored import checkpoints

LAST_LINES = 20
FOLLOWED = 15
MOMENT_S = 1.0
# Failures within this time are assumed to have one cause; their order is chance.
TOGETHER_S = 10.0


class ExaminedFailure(msgspec.Struct, frozen=True):
    """A failure with its log lines and known causes."""

    failure: Failure
    log: str = ""  # path of the log; empty if there is none
    error: str | None = None
    last_lines: list[str] = []
    causes: list[Cause] = []


class AttemptLine(msgspec.Struct, frozen=True):
    """Outcome of one attempt."""

    number: int
    outcome: str
    reason: str
    committed_step: int | None


class Diagnosis(msgspec.Struct, frozen=True):
    """Diagnosis of an attempt, as `primeslurm doctor RUN --json` prints it."""

    run: str
    attempt: int
    outcome: str  # outcome in end.json; else running, silent (the head is unresponsive), or Slurm's state of the job
    reason: str
    first: ExaminedFailure | None
    followed: list[EventText]  # errors and warnings after the first failure, oldest first
    recovered: list[Failure]  # failures from which the run recovered automatically
    invalid: list[str]  # reasons why the results of the run are invalid
    attempts: list[AttemptLine]
    advice: list[Advice] = []  # advice from the load of the engines, while the run is active
    damaged: list[str] = []  # damaged checkpoints that were moved aside, and why

    @property
    def well(self) -> bool:
        """True if the attempt has no failure and the run is valid."""
        return self.first is None and not self.invalid and not self.damaged


def diagnose(
    run: RunDirectory,
    attempt: Attempt,
    job_state: Callable[[JobRecord], str | None],
    max_kl: float = MAX_KL,
    find_causes: FindCauses = lambda attempt, nodes: [],
    now: float | None = None,
    recheck_s: float = RECHECK_S,
    find_obstacles: FindObstacles = lambda job: [],
) -> Diagnosis:
    """Diagnose an attempt from its events, heartbeats and logs. See `read_status` for the other arguments.

    `max_kl` is the largest valid median of the KL between trainer and engines. Raises RunError if the attempt has no
    readable plan.
    """
    now = time.time() if now is None else now
    outline = read_outline(attempt)
    events = attempt_events(attempt)
    all_failures = failures(events, attempt.heartbeats())
    liveness = _liveness(attempt, now, find_causes, recheck_s)
    outcome, reason = _outcome(attempt, job_state, liveness)
    all_failures += unresponsive_processes(attempt.fleet()) if outcome in _UNDER_WAY else []
    observed = _unresponsive(liveness, events, now) if outcome in (*_NOT_FAILED, "silent") else []
    job = attempt.job()
    if job is not None and _may_wait(run, attempt, outcome):
        observed += _cannot_start(job, find_obstacles(job))
    unrecovered = [failure for failure in all_failures if not failure.recovered]
    unrecovered += [each.failure for each in observed]
    if not unrecovered and outcome not in _NOT_FAILED:
        unrecovered = [_end_of_job(attempt, events, outcome, reason)]
    causes_of = {each.failure: each for each in observed}
    last = min((failure.time for failure in unrecovered), default=0.0) + TOGETHER_S
    simultaneous = sorted((each for each in unrecovered if each.time <= last), key=lambda failure: failure.time)
    first = _first([causes_of.get(failure) or _examine(run, attempt, outline, failure) for failure in simultaneous])
    recipe = run.recipe()
    return Diagnosis(
        run=run.name,
        attempt=attempt.number,
        outcome=outcome,
        reason=reason,
        first=first,
        followed=_followed(first, notable(events)),
        recovered=[failure for failure in all_failures if failure.recovered],
        invalid=problems(rows(run.path), dropped_rollouts(attempt), recipe.batch_size, max_kl),
        attempts=[_line(each) for each in run.attempts()],
        damaged=checkpoints.set_asides(run.path),
        advice=_advice(attempt, recipe) if outcome in _UNDER_WAY else [],
    )


def _advice(attempt: Attempt, recipe: RunRecipe) -> list[Advice]:
    state = progress_of(attempt, "rl")
    if not isinstance(state, OrchestratorState):
        return []
    return advise(state.roles, tunables_of(recipe), state.shares.values())


_UNDER_WAY = ("running", "RUNNING")
_NOT_FAILED = ("running", "completed", "cancelled", "preempted", "PENDING", "RUNNING", SUBMITTING)


def _liveness(attempt: Attempt, now: float, find_causes: FindCauses, recheck_s: float) -> RunLiveness:
    if attempt.end() is not None:
        return RunLiveness()
    return check_liveness(attempt, attempt.fleet(), now, agents=True, find_causes=find_causes, recheck_s=recheck_s)


def _outcome(attempt: Attempt, job_state: Callable[[JobRecord], str | None], liveness: RunLiveness) -> tuple[str, str]:
    if end := attempt.end():
        return end.outcome, end.reason + (f"; {end.why_not_requeued}" if end.why_not_requeued else "")
    state = job_state(job) if (job := attempt.job()) else None
    started = files.exists(attempt.fleet_file)
    if state is not None and state.startswith((*ALIVE, NO_ANSWER)):
        answer = "Slurm does not answer" if state == NO_ANSWER else state
        if liveness.silence is not None:
            return "silent", f"{liveness.silence.text.partition(';')[0]}; {answer}"
        return ("running" if started or state != NO_ANSWER else "silent"), answer
    if state is None:
        return "lost", "the attempt did not record its end, and Slurm does not know the job"
    return re.split(r"\W", state, maxsplit=1)[0], state


def _may_wait(run: RunDirectory, attempt: Attempt, outcome: str) -> bool:
    """True if the job of an attempt may be pending, for its first start or after a requeue."""
    end = attempt.end()
    return outcome == "PENDING" or (end is not None and end.requeued and attempt.number == run.latest().number)


def _cannot_start(job: JobRecord, obstacles: Sequence[Obstacle]) -> list[ExaminedFailure]:
    if not obstacles:
        return []
    first = obstacles[0]
    causes = [Cause(f"{each.component or 'the job'} {each.text}", each.fix) for each in obstacles]
    component = f"component {first.component}" if first.component else "job"
    return [ExaminedFailure(Failure(job.submitted_at, component, "", first.how), causes=causes)]


def _unresponsive(liveness: RunLiveness, events: Sequence[Event], now: float) -> list[ExaminedFailure]:
    # If the head is unresponsive, only the head counts. Otherwise, agents count that the head has not given up yet.
    if liveness.silence is not None:
        text = liveness.silence.text.partition(";")[0].removeprefix("the head ")
        at = liveness.silence.since or _last_time(events)
        causes = [Cause(cause, _fix(cause)) for cause in liveness.silence.causes]
        return [ExaminedFailure(Failure(at, "head", "", text), causes=causes)]
    lost = {event.node for event in events if isinstance(event, NodeLost)}
    unresponsive = []
    for agent in liveness.agents:
        if agent.node not in lost:
            age = f"for {duration(max(0.0, now - agent.since))}" if agent.since is not None else "for an unknown time"
            how = f"its agent has not written {age}"
            at = agent.since or _last_time(events)
            failure = Failure(at, f"node {agent.node}", agent.node, how)
            unresponsive.append(ExaminedFailure(failure, causes=[_AGENT_SILENT]))
    return unresponsive


_AGENT_SILENT = Cause(
    "the agent is gone or stopped, or its node or its file system is unresponsive",
    "wait: the head gives the node up after `node_silent_s` of the site file",
)
_FIXES = (
    (r"read-only|no room|is full|may not write", "fix this first: the run is paused until then"),
    (r"agents write.*: the head", "wait: the agents requeue the job after twice `node_silent_s` of the site file"),
    (SRUN_REPORTS, "wait: the agents requeue the job after twice `node_silent_s` of the site file"),
    (r"none of the", "check the nodes and their mounts; `primeslurm cancel` ends the job"),
    (r"Slurm", "check `sinfo -R`, `scontrol ping` and the logs of the Slurm daemons"),
    (r"clocks differ", "synchronise the clocks of the nodes (chrony, ntp)"),
)


def _fix(cause: str) -> str:
    return next((fix for pattern, fix in _FIXES if re.search(pattern, cause)), "check the consoles of the nodes")


def _last_time(events: Sequence[Event]) -> float:
    return max((event.time for event in events), default=0.0)


def _end_of_job(attempt: Attempt, events: Sequence[Event], outcome: str, reason: str) -> Failure:
    # No event reports a failure, so the end of the job is the failure.
    end = attempt.end()
    at = end.time if end else _last_time(events)
    if not at and (job := attempt.job()):
        at = job.submitted_at
    return Failure(at, (end.suspect if end else "") or "job", "", end.reason if end else outcome_text(outcome, reason))


def _first(candidates: Sequence[ExaminedFailure]) -> ExaminedFailure | None:
    return min(candidates, key=lambda each: (_rank(each), each.failure.time), default=None)


def _rank(examined: ExaminedFailure) -> int:
    """0: its cause is known; 1: nothing is known; 2: its log only reports symptoms of another failure."""
    symptoms = {signature.cause for signature in failure_signatures.KNOWN if signature.symptom}
    if examined.causes and all(cause.cause in symptoms for cause in examined.causes):
        return 2
    return 0 if examined.causes or examined.error else 1


def _examine(run: RunDirectory, attempt: Attempt, outline: PlanOutline, failure: Failure) -> ExaminedFailure:
    path = _log_of(run, attempt, outline, failure)
    lines = lines_until(path, failure.time) if path else []
    if failure.component == "job":
        lines = informative_lines(_lines_of_start(lines, attempt))
    causes = [Cause(cause.cause, cause.fix, line) for cause, line in failure_signatures.in_log(lines[-2000:])]
    return ExaminedFailure(
        failure,
        log=str(path or ""),
        error=(srun_error(lines) if failure.component == "job" else "") or error_line(lines),
        last_lines=lines[-LAST_LINES:],
        causes=causes
        or failure_signatures.of_reason(failure.how)
        or failure_signatures.of_exit(failure.code)
        or _of_job(failure),
    )


def _lines_of_start(lines: list[str], attempt: Attempt) -> list[str]:
    # A requeued job appends to the output of its earlier starts. Without a marker of the start, all lines count.
    start = attempt.start()
    part = of_start("\n".join(lines) + "\n", start.word) if start is not None else None
    return lines if part is None else part.splitlines()


def _of_job(failure: Failure) -> list[Cause]:
    return failure_signatures.of_job(failure.how.partition(":")[0]) if failure.component == "job" else []


def _log_of(run: RunDirectory, attempt: Attempt, outline: PlanOutline, failure: Failure) -> Path | None:
    for process in outline.processes():
        if process.name == failure.component:
            return attempt.path / process.log
    if failure.component == "job" or re.match(r"agent-\d+$|head$", failure.component):
        job = attempt.job()
        if job is not None and files.is_file(output := run.job_output(job.job_id)):
            return output
        outputs = [*files.listing(run.path, "slurm-*.out"), *files.listing(run.path / "submitit", "*.out")]
        written = {path: about.st_mtime for path in outputs if (about := files.status(path))}
        return max(sorted(written), key=lambda path: written[path], default=None)
    return None


def _followed(first: ExaminedFailure | None, texts: Sequence[EventText]) -> list[EventText]:
    if first is None:
        return []
    # Agents poll, so the recorded order of events within one second means nothing.
    begin, component = first.failure.time - MOMENT_S, first.failure.component
    later = [text for text in texts if text.time >= begin and text.who != component]
    return [text for text in later if text.level != "info" or text.who == "head"][:FOLLOWED]


def _line(attempt: Attempt) -> AttemptLine:
    end = attempt.end()
    if end is None:
        return AttemptLine(attempt.number, "no end", "", None)
    return AttemptLine(attempt.number, end.outcome, end.reason, end.committed_step)
