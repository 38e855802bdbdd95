"""The state of the whole run as its head sees it, and when an attempt ends.

Pure: reports and a clock in, decisions out.

An attempt ends when the work is complete, when something dies that is not restarted in place, when a node falls silent,
when nothing makes progress, or when it is told to (preemption, time limit, cancel).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from primeslurm.node.supervisor import ProcessState
from primeslurm.plan.model import Plan, Process
from primeslurm.wire import exits

NODE_SILENT_S = 90.0
"""A node whose heartbeat is older than this is lost. Network file systems may show old files for up to 60 s."""
NODE_START_S = 300.0
"""Longest wait for every node's agent to report."""


class ProcessReport(msgspec.Struct, frozen=True):
    """One process in a node's heartbeat."""

    state: str
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    since: float = 0.0
    healthy: bool = False
    """Answers 200 on /health: for an engine, it is up and holds the current policy."""
    reason: str = ""


class NodeReport(msgspec.Struct, frozen=True):
    """A node's heartbeat: `nodes/<index>.json`."""

    index: int
    name: str
    address: str
    time: float
    agent_pid: int
    ports: dict[str, dict[str, int]]
    processes: dict[str, ProcessReport]
    ended: bool = False
    error: str = ""


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    """Asked to stop by Slurm; resumes as a new attempt."""
    FAILED = "failed"
    """Something died; resumes as a new attempt while attempts are left."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Ending:
    """Why and how the attempt ends."""

    outcome: Outcome
    reason: str
    suspect: str = ""


@dataclass
class Fleet:
    """The head's view. Feed it heartbeats with `observe`, ask `decide`."""

    plan: Plan
    started_at: float
    nodes: dict[int, NodeReport] = field(default_factory=dict)
    seen_at: dict[int, float] = field(default_factory=dict)
    progress: Any = None
    progress_at: float = 0.0

    def observe(self, report: NodeReport, now: float) -> None:
        """Take in a heartbeat. Freshness counts from when its content last changed, by this head's own clock."""
        known = self.nodes.get(report.index)
        if known is None or known.time != report.time:
            self.seen_at[report.index] = now
        self.nodes[report.index] = report

    def observe_progress(self, marker: Any, now: float) -> None:
        """Take in a value that changes whenever the run gets on (finished rollouts, version, step)."""
        if marker != self.progress or not self.progress_at:
            self.progress, self.progress_at = marker, now

    @property
    def assembled(self) -> bool:
        """Whether every node has reported."""
        return len(self.nodes) == len(self.plan.nodes)

    def report(self, name: str) -> ProcessReport | None:
        """What is known of one process."""
        for node in self.nodes.values():
            if name in node.processes:
                return node.processes[name]
        return None

    def decide(self, now: float) -> Ending | None:
        """The reason to end the attempt now, or None."""
        return self._lost_node(now) or self._dead_process() or self._complete() or self._stalled(now)

    def _lost_node(self, now: float) -> Ending | None:
        for index, report in sorted(self.nodes.items()):
            if report.error:
                return Ending(Outcome.FAILED, f"node {report.name}: {report.error}", report.name)
            silence = now - self.seen_at[index]
            if silence > NODE_SILENT_S:
                return Ending(Outcome.FAILED, f"node {report.name} has been silent for {silence:.0f} s", report.name)
        if not self.assembled and now - self.started_at > NODE_START_S:
            missing = sorted({node.index for node in self.plan.nodes} - set(self.nodes))
            reason = f"no sign of nodes {missing} within {NODE_START_S:.0f} s"
            return Ending(Outcome.FAILED, reason, f"node {missing[0]}")
        return None

    def _dead_process(self) -> Ending | None:
        for process in self.plan.processes():
            report = self.report(process.name)
            if report is None or report.state != ProcessState.FAILED:
                continue
            if report.exit_code == exits.CHECKPOINTED:
                return Ending(Outcome.PREEMPTED, f"{process.name} checkpointed and stopped", process.name)
            if report.exit_code == exits.STALLED:
                return Ending(Outcome.FAILED, f"{process.name} saw no progress: see its events", process.name)
            return Ending(Outcome.FAILED, f"{process.name} {_died(report)}", process.name)
        return None

    def _complete(self) -> Ending | None:
        last: tuple[Process, ...] = tuple(p for p in self.plan.processes() if p.role in ("trainer", "orchestrator"))
        reports = [self.report(process.name) for process in last]
        if reports and all(report is not None and report.state == ProcessState.DONE for report in reports):
            return Ending(Outcome.COMPLETED, "all steps done")
        return None

    def _stalled(self, now: float) -> Ending | None:
        limit = self.plan.stall_timeout_s * 1.5  # the orchestrator looks first, and knows more
        if self.progress_at and now - self.progress_at > limit:
            return Ending(Outcome.FAILED, f"no progress for {now - self.progress_at:.0f} s", "orchestrator")
        return None


class FleetState(StrEnum):
    """State of one process in the words of an operator."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    STALE = "STALE"
    """Up, but not on the current policy version: its router leaves it out."""
    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    """Its node has not been heard of for a while."""
    RESTARTING = "RESTARTING"
    DEAD = "DEAD"
    """Ended, and its attempt ends with it."""
    LOST = "LOST"
    """Ended too often to be restarted again."""
    DONE = "DONE"


def fleet_state(process: Process, report: ProcessReport | None, silence: float) -> FleetState:
    """The operator's word for what a node reports of a process; `silence` = seconds since the node was heard of."""
    if report is None:
        return FleetState.STARTING
    state = report.state
    if state in (ProcessState.LOADING, ProcessState.READY) and silence > NODE_SILENT_S / 3:
        return FleetState.SUSPECT
    if state == ProcessState.READY:
        return FleetState.HEALTHY if report.healthy or process.health is None else FleetState.STALE
    if state == ProcessState.FAILED:
        return FleetState.LOST if process.restart == "in_place" else FleetState.DEAD
    return {
        ProcessState.WAITING: FleetState.STARTING,
        ProcessState.LOADING: FleetState.LOADING,
        ProcessState.BACKOFF: FleetState.RESTARTING,
    }.get(ProcessState(state), FleetState.DONE)


def _died(report: ProcessReport) -> str:
    code = report.exit_code
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    again = f" after {report.restarts} restarts" if report.restarts else ""
    return how + again + (f" ({report.reason})" if report.reason else "")


def should_requeue(ending: Ending, attempt: int, plan: Plan, commits: Mapping[int, int | None]) -> tuple[bool, str]:
    """Whether the job resumes as a new attempt, and why not if it does not.

    `commits`: newest committed step at the end of each failed attempt so far, this one included.
    """
    if ending.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
        return False, ""
    if attempt >= plan.max_attempts:
        return False, f"this was attempt {attempt} of {plan.max_attempts}"
    if ending.outcome is Outcome.PREEMPTED:
        return True, ""
    recent = [commits[n] for n in sorted(commits)][-3:]
    if len(recent) == 3 and len(set(recent)) == 1:
        return False, "three failed attempts in a row committed nothing new"
    return True, ""
