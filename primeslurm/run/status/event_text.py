"""Texts of the events that people read. Other events are for programs only."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from primeslurm.base.units import duration
from primeslurm.records.events import evaluation, nodes, policy, processes, training
from primeslurm.records.fleet import PreflightCheck
from primeslurm.records.record import Event

Level = Literal["info", "warning", "error"]
# States of a process that ended unexpectedly.
DIED = ("backoff", "fallen", "failed")


class EventText(msgspec.Struct, frozen=True):
    """Text of a notable event."""

    time: float  # Unix time
    who: str  # process, node or component that the text is about
    text: str
    level: Level = "info"


def notable(events: Iterable[Event]) -> list[EventText]:
    """Return texts of the notable events, in the given order. Consecutive equal texts become one with a count."""
    texts: list[EventText] = []
    times = 1
    for event in events:
        text = words_of(event)
        if text is None:
            continue
        if texts and (texts[-1].who, _without_count(texts[-1])) == (text.who, text.text):
            times += 1
            texts[-1] = msgspec.structs.replace(text, text=f"{text.text} ({times} times)")
        else:
            times = 1
            texts.append(text)
    return texts


def newest_texts(texts: Sequence[EventText], count: int) -> list[EventText]:
    """Return the newest `count` texts, oldest first. Only the last one of equal texts counts."""
    newest = {(each.who, _without_count(each)): each for each in texts}
    return sorted(newest.values(), key=lambda each: each.time)[-count:]


def _without_count(text: EventText) -> str:
    return re.sub(r" \(\d+ times\)$", "", text.text)


def exit_text(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def words_of(event: Event) -> EventText | None:
    """Return the text of an event. None if it is for programs only, or every agent or rank repeats it."""
    match event:
        case processes.ProcessStarted(restarts=restarts):
            return _tell(event, event.name, f"restarted (restart {restarts})") if restarts else None
        case processes.ProcessStartFailed(error=error):
            return _tell(event, event.name, "cannot be started" + _because(error), "error")
        case processes.ProcessExited(state=state) if state in DIED:
            again = {"backoff": "; it is restarted", "fallen": "; its restart group is restarted"}.get(state, "")
            text = exit_text(event.code) + _because(event.reason) + again
            return _tell(event, event.name, text, "warning" if again else "error")
        case processes.ProcessUnresponsive(name=name, reason=reason):
            return _tell(event, name, f"{reason}; it is killed, and its log has the stacks of its threads", "error")
        case processes.ProcessContinued(name=name, seconds=seconds):
            return _tell(event, name, f"was stopped by a signal for {duration(seconds)}, and was continued", "warning")
        case processes.RanksUnresponsive():
            return _tell(event, rank_names(event), describe_wait(event), "warning")
        case processes.RouterIncomplete():
            more = f", and {len(event.foreign)} engines of another run" if event.foreign else ""
            text = f"served {event.serves} of {event.planned} engines{more}; its list of engines is corrected"
            return _tell(event, event.process, text, "warning")
        case processes.RouterComplete(planned=planned, seconds=seconds):
            return _tell(event, event.process, f"serves all {planned} engines again after {duration(seconds)}")
        case processes.RouterRestarted(reason=reason):
            return _tell(event, event.process, f"is restarted: {reason}", "warning")
        case training.EnvironmentFails(environment=environment, error=error):
            return _tell(event, f"environment {environment}", "fails every time" + _because(error), "error")
        case training.CheckpointCommitted(process="trainer-rank-0", step=step):
            return _tell(event, "trainer", f"committed step {step}")
        case training.RolloutFailed(error=error):
            return _tell(event, event.process, "a rollout failed" + _because(error), "warning")
        case training.Stalled(suspect=suspect, error=error):
            return _tell(event, suspect, "no progress; this process is the suspect" + _because(error), "error")
        case training.ReplicaLost(router=router):
            return _tell(event, router, "is given up, with its replica", "warning")
        case training.StepSkipped(step=step, grad_norm=norm):
            text = f"step {step} was skipped: its gradient norm is {norm}"
            return _tell(event, event.process, text, "warning")
        case training.TaskGivenUp():
            chosen = f" (index {event.task})" if event.task is not None else ""
            text = f"task {event.example}{chosen} is given up: {event.reason}"
            return _tell(event, f"environment {event.environment}", text, "warning")
        case training.CheckpointSetAside(step=step, reason=reason, path=path):
            text = f"the checkpoint of step {step} is damaged and was moved to {path}" + _because(reason)
            return _tell(event, "trainer", text, "error")
        case processes.StorageFault():
            end = "it works again" if event.recovered else "the operation was given up"
            where = "" if event.path in event.error else f"{event.path}: "
            why = f"{where}{event.error} ({event.failures} failures in {duration(event.seconds)})"
            text = f"shared file system: {why}, {end}"
            return _tell(event, event.process, text, "warning" if event.recovered else "error")
        case training.NothingKept(rollouts=rollouts, reasons=reasons):
            why = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
            return _tell(
                event, event.process, f"filters rejected every group of the last {rollouts} rollouts: {why}", "warning"
            )
        case evaluation.EvaluationDone(step=step, rewards=rewards, failed=failed):
            means = ", ".join(f"{label} {reward:.3f}" for label, reward in rewards.items())
            more = f"; {failed} samples failed" if failed else ""
            return _tell(event, "evaluation", f"step {step}: {means}{more}", "warning" if failed else "info")
        case evaluation.EvaluationSkipped(step=step, why=why):
            return _tell(event, "evaluation", f"step {step} was skipped{_because(why)}", "warning")
        case evaluation.EvaluationSampleFailed(error=error):
            return _tell(event, "evaluation", "a rollout failed" + _because(error), "warning")
        case policy.EngineUpdateFailed(engine=engine, error=error):
            return _tell(event, engine, "did not load the new weights" + _because(error), "warning")
        case policy.EngineStateChanged(engine=engine, state="DOWN", reason=reason) if reason not in ("", "given up"):
            return _tell(event, engine, "is down" + _because(reason), "warning")
        case policy.EventLoopDelayed(seconds=seconds):
            text = f"was blocked for {duration(seconds)}: its node is overloaded; engines are not blamed for it"
            return _tell(event, event.process, text, "warning")
        case policy.EngineAnswersDamaged(engine=engine, damaged=damaged, answers=answers, error=error):
            text = f"gave damaged answers, {damaged} of {answers}, and is restarted; last error: {error}"
            return _tell(event, engine, text, "error")
        case policy.EngineRestarted(engine=engine, reason=reason):
            return _tell(event, engine, f"is restarted: {reason or 'it did not load the new weights'}", "warning")
        case nodes.AttemptEnds(process="head" | "batch", outcome=outcome, reason=reason):
            level: Level = "error" if outcome == "failed" else "info"
            return _tell(event, event.process, f"ends the attempt as {outcome}: {reason}", level)
        case nodes.AttemptEnded(outcome=outcome):
            next_ = "requeued" if event.requeued else "not requeued" + _because(event.why_not)
            return _tell(event, "head", f"attempt {outcome}, {next_}")
        case nodes.ProcessesGivenUp(processes=names, reason=reason):
            few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            return _tell(event, "head", f"continues without {few}{_because(reason)}", "error")
        case nodes.ProcessesRestarted(unit=unit, reason=reason):
            return _tell(event, unit, "is restarted as a group" + _because(reason), "warning")
        case nodes.NodesAssigned(process="head", nodes=names, spares=spares):
            more = f", and {len(spares)} more as spares" if spares else ""
            all_nodes = f"all {len(names)} nodes are" if len(names) > 1 else "the node is"
            return _tell(event, "head", f"{all_nodes} ready{more}")
        case nodes.PreflightDone(node=node, fitness="unfit", checks=checks):
            return _tell(event, f"node {node}", "failed its preflight" + _because(_failed(checks)), "error")
        case nodes.GpuFailed(node=node, checks=checks):
            return _tell(event, f"node {node}", "a GPU failed" + _because(_failed(checks)), "error")
        case nodes.NodeLost(node=node, reason=reason):
            return _tell(event, f"node {node}", "is lost" + _because(reason), "warning")
        case nodes.NodeReplaced(node=node, by=by):
            return _tell(event, f"node {node}", f"is replaced by {by}")
        case nodes.ProcessesMoved(node=node, processes=names, to=to):
            where = f"{len(to)} other nodes" if len(to) > 1 else to[0]
            return _tell(event, f"node {node}", f"its {len(names)} processes move to {where}")
        case nodes.LaunchedAgain(without=without):
            return _tell(event, "batch", f"starts all agents again without {', '.join(without)}", "warning")
        case nodes.AgentFailed(error=error):
            return _tell(event, event.process, "the agent failed" + _because(error), "error")
        case nodes.PortTaken(port=port, instead=instead):
            return _tell(event, event.name, f"port {port} is taken by another user; it uses {instead}", "warning")
        case nodes.HeadFailed(error=error):
            return _tell(event, event.process, "the head failed" + _because(error), "error")
        case nodes.HeartbeatFailed(error=error):
            return _tell(event, event.process, "cannot write its heartbeat" + _because(error), "warning")
        case nodes.FileSystemFault(what=""):
            return _tell(event, "file system", "has free space again")
        case nodes.FileSystemFault(what=what):
            return _tell(event, "file system", f"the run waits: {what}", "error")
        case nodes.PublishFailed(error=error):
            return _tell(event, event.process, "cannot write fleet.json" + _because(error), "warning")
        case _:
            return None


def rank_names(event: processes.RanksUnresponsive) -> str:
    more = f" and {len(event.behind) - 3} more" if len(event.behind) > 3 else ""
    return ", ".join(event.behind[:3]) + more


def describe_wait(event: processes.RanksUnresponsive) -> str:
    where = f"no heartbeat for {duration(event.seconds)} in phase {event.phase or '?'}"
    where += f" of step {event.step}" if event.step is not None else ""
    if event.waiting:
        return f"{where}: {event.waiting} ranks wait for it in a collective"
    if len(event.behind) == 1:
        return f"{where}: it takes unusually long"  # a single rank has nobody to wait for
    return f"{where}: all ranks wait in the same collective"


def _tell(event: Event, who: str, text: str, level: Level = "info") -> EventText:
    return EventText(event.time, who, text, level)


def _failed(checks: Sequence[PreflightCheck]) -> str:
    return "; ".join(check.text for check in checks if check.level == "failed")


def _because(text: str | None) -> str:
    return f": {text}" if text else ""
