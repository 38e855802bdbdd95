"""Files in the attempt directory through which agents and head communicate.

`agents/<rank>.json` is an agent's heartbeat. The head writes `fleet.json` (ready processes, and the end), `roster.json`
(the node assignment) and `preflight.json` (reference values for the other nodes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from primeslurm.records.heartbeats import NODE_HEARTBEAT_S


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"  # stopped by Slurm; the run resumes in a new attempt
    FAILED = "failed"  # the run resumes in a new attempt while attempts are left
    CANCELLED = "cancelled"


def outcome_text(outcome: str, reason: str) -> str:
    """Format outcome and reason without repeating the outcome: `preempted: Slurm cancels the job`."""
    if not reason or reason.startswith(outcome):
        return reason or outcome
    return f"{outcome}: {reason}"


@dataclass(frozen=True)
class Ending:
    """How and why the attempt ends."""

    outcome: Outcome
    reason: str
    suspect: str = ""  # node, process or part that probably caused it
    final: bool = False  # another attempt would end in the same way
    error: str = ""  # error message of the failed process; empty if a node, a signal or Slurm ended the attempt


class HeartbeatReport(msgspec.Struct, frozen=True):
    """The last heartbeat of a process, and its age."""

    phase: str = ""
    step: int | None = None
    number: int = 0  # heartbeats so far; 0 before the first one
    collectives: int = 0  # collectives that a trainer rank has begun
    silent_s: float = 0.0  # age of the heartbeat, without time in which the process could not run
    limit_s: float = 0.0  # timeout: an older heartbeat means unresponsive; 0: none known
    stopped: bool = False  # stopped by a signal

    @property
    def text(self) -> str:
        phase = f", phase {self.phase}" if self.phase else "" if self.number else ", has not begun"
        step = f" of step {self.step}" if self.step is not None else ""
        return f"silent for {self.silent_s:.0f} s{phase}{step}" + (", stopped by a signal" if self.stopped else "")


class ProcessReport(msgspec.Struct, frozen=True):
    """State of one process in an agent's heartbeat."""

    state: str  # see `node.agent.supervision.ProcessState`
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    since: float = 0.0  # begin of this state, in Unix seconds
    healthy: bool = False  # it answers 200 on /health; an engine does so only with the current policy
    reason: str = ""
    generation: int = 0  # generation of its restart group at its last start
    failed_starts: int = 0  # consecutive starts that failed with the same error
    start_error: str = ""  # that error
    heartbeat: HeartbeatReport | None = msgspec.field(name="beat", default=None)  # None without heartbeats and probes


class PreflightState(StrEnum):
    """Result of a node's preflight so far."""

    CHECKING = "checking"
    FIT = "fit"
    UNFIT = "unfit"


class AgentReport(msgspec.Struct, frozen=True):
    """An agent's heartbeat: `agents/<rank>.json`."""

    rank: int
    name: str  # the node's Slurm name
    address: str
    time: float  # by the node's wall clock: to be displayed, never compared
    agent_pid: int
    number: int = 0  # heartbeats so far; readers detect a new one by it
    fitness: PreflightState = PreflightState.CHECKING
    unfit_because: str = ""  # why the preflight failed
    checks_environments: bool = False  # whether it still tries to load them; a node can be fit before that
    environments_fail: str = ""  # why environments do not load there
    failed: list[str] = []  # names of the failed checks
    file_system: str = ""  # fault of the run's file system, for which no node is to blame
    node: int | None = None  # Plan index of the assigned node; None for a spare
    ports: dict[str, dict[str, int]] = {}
    processes: dict[str, ProcessReport] = {}
    ended: bool = False
    error: str = ""


class RestartOrder(msgspec.Struct, frozen=True):
    """Order to the members of a restart group: processes of an older generation end, and start again unless held."""

    generation: int
    hold: bool


class FleetView(msgspec.Struct, frozen=True):
    """`fleet.json`: what the head tells all agents."""

    time: float  # by the head's wall clock: to be displayed, never compared
    ready: list[str] = []
    states: dict[str, str] = {}
    units: dict[str, RestartOrder] = {}  # restart groups that were restarted at least once
    lost: list[str] = []  # processes that were given up: they end, and nothing waits for them
    silent: dict[str, HeartbeatReport] = {}  # processes without a heartbeat for a while
    hung: dict[str, str] = {}  # unresponsive trainer ranks that their agents must end, and why
    ending: Ending | None = None
    waits_for: str = ""  # fault of the shared file system that the run waits out
    release: bool = False  # while ending: trainers are done or out of time, so that everything else may stop
    heartbeat_s: float = NODE_HEARTBEAT_S  # longest time between two heartbeats of the head or of an agent


class AssignedAgent(msgspec.Struct, frozen=True):
    """The agent that a node of the Plan is assigned to."""

    rank: int
    name: str  # the node's Slurm name


class AssignmentRecord(msgspec.Struct, frozen=True):
    """`roster.json`: the node assignment. Every change raises the generation."""

    generation: int
    agents: dict[int, AssignedAgent] = msgspec.field(name="seats")  # by Plan index of the node
    moved: dict[str, int] = {}  # processes of lost nodes, and the Plan nodes that run them now

    def node_of(self, rank: int) -> int | None:
        return next((node for node, agent in self.agents.items() if agent.rank == rank), None)


CheckLevel = Literal["ok", "warning", "failed"]


class PreflightCheck(msgspec.Struct, frozen=True):
    """Result of one preflight check."""

    name: str
    level: CheckLevel
    text: str
    fix: str = ""


class SharedCheck(PreflightCheck, frozen=True):
    """Result of a check of the run's file system, for which no node is to blame."""


class PreflightReference(msgspec.Struct, frozen=True):
    """`preflight.json`: properties of the head's node that the other nodes compare themselves with."""

    plan_digest: str
    packages: dict[str, str | None]
