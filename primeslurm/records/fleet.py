"""What agents and head tell each other, through files in the attempt directory.

`agents/<rank>.json` is an agent's heartbeat. The head's are `fleet.json` (what is ready, and the end), `roster.json`
(who plays which node of the Plan) and `preflight.json` (what nodes compare themselves with).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    """Asked to stop by Slurm; resumes as a new attempt."""
    FAILED = "failed"
    """Something died; resumes as a new attempt while attempts are left."""
    CANCELLED = "cancelled"


def outcome_text(outcome: str, reason: str) -> str:
    """Write how something ended and why, without naming the outcome twice: `preempted: Slurm cancels the job`."""
    if not reason or reason.startswith(outcome):
        return reason or outcome
    return f"{outcome}: {reason}"


@dataclass(frozen=True)
class Ending:
    """Why and how the attempt ends."""

    outcome: Outcome
    reason: str
    suspect: str = ""
    final: bool = False
    """Another attempt would end in the same way."""
    error: str = ""
    """Message of what has failed. Empty if nothing says why, or if a node, a signal or Slurm has ended the attempt."""


class HeartbeatReport(msgspec.Struct, frozen=True):
    """Where a process was when it was last heard of, and how long ago that was."""

    phase: str = ""
    step: int | None = None
    number: int = 0
    """HeartbeatLimits so far; 0: it has not begun."""
    collectives: int = 0
    """Collectives that a trainer rank has begun."""
    silent_s: float = 0.0
    """Without the time for which it cannot be blamed."""
    limit_s: float = 0.0
    """It hangs if it is silent for longer; 0: nobody knows."""
    stopped: bool = False
    """By a signal."""

    @property
    def words(self) -> str:
        """Tell for how long the process has been silent, and where."""
        phase = f", phase {self.phase}" if self.phase else "" if self.number else ", has not begun"
        step = f" of step {self.step}" if self.step is not None else ""
        return f"silent for {self.silent_s:.0f} s{phase}{step}" + (", stopped by a signal" if self.stopped else "")


class ProcessReport(msgspec.Struct, frozen=True):
    """One process in an agent's heartbeat."""

    state: str
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    since: float = 0.0
    healthy: bool = False
    """Answers 200 on /health: for an engine, it is up and holds the current policy."""
    reason: str = ""
    generation: int = 0
    """Generation of its restart group that it was last started in."""
    failed_starts: int = 0
    """So often, most recently, it ended alike before it was ready."""
    start_error: str = ""
    """With this error."""
    heartbeat: HeartbeatReport | None = None
    """None: it neither beats nor is probed, or does not run."""


class PreflightState(StrEnum):
    """Whether an agent's node can be worked on."""

    CHECKING = "checking"
    FIT = "fit"
    UNFIT = "unfit"


class AgentReport(msgspec.Struct, frozen=True):
    """An agent's heartbeat: `agents/<rank>.json`."""

    rank: int
    name: str
    """The node's name as Slurm knows it."""
    address: str
    time: float
    """When it was written, by the node's own wall clock: to be shown, never to be compared."""
    agent_pid: int
    number: int = 0
    """Heartbeats so far: whoever reads them sees by it that there is a new one."""
    fitness: PreflightState = PreflightState.CHECKING
    unfit_because: str = ""
    environments_fail: str = ""
    """Why environments do not load there."""
    failed: list[str] = []
    """Names of the checks that the node failed."""
    file_system: str = ""
    """What is wrong with the file system of the run directory, of which no node is to blame."""
    node: int | None = None
    """The Plan's node that it plays; None while it is a spare."""
    ports: dict[str, dict[str, int]] = {}
    processes: dict[str, ProcessReport] = {}
    ended: bool = False
    error: str = ""


class RestartOrder(msgspec.Struct, frozen=True):
    """What the processes of a restart group have to do: end those of an older generation; start, unless held."""

    generation: int
    hold: bool


class FleetView(msgspec.Struct, frozen=True):
    """`fleet.json`: what the head tells every agent."""

    time: float
    """When it was written, by the head's own wall clock: to be shown, never to be compared."""
    ready: list[str] = []
    states: dict[str, str] = {}
    units: dict[str, RestartOrder] = {}
    """Restart groups (`unit` in the Plan) that were restarted at least once."""
    lost: list[str] = []
    """Processes that were given up: they end, and nothing waits for them."""
    silent: dict[str, HeartbeatReport] = {}
    """Processes that have been silent for a while."""
    hung: dict[str, str] = {}
    """Trainer ranks that their agents have to end, and why."""
    ending: Ending | None = None
    waits_for: str = ""
    """What is wrong with the shared file system, while the run waits for that to be over."""
    release: bool = False
    """Set while ending: trainers are done (or out of time), everything else may stop."""
    heartbeat_s: float = 1.0
    """Longest time between two signs of life of the head, and of an agent."""


class AssignedAgent(msgspec.Struct, frozen=True):
    """The agent that plays one node of the Plan."""

    rank: int
    name: str
    """The node's name as Slurm knows it."""


class AssignmentRecord(msgspec.Struct, frozen=True):
    """`roster.json`. A new generation is written whenever a node is replaced, or left to nobody."""

    generation: int
    agents: dict[int, AssignedAgent] = msgspec.field(name="seats")
    """By index of the Plan's node."""
    moved: dict[str, int] = {}
    """Processes of nodes that are lost, and the Plan's nodes that run them instead."""

    def node_of(self, rank: int) -> int | None:
        """Return the Plan's node that an agent plays, or None: it is a spare, or was replaced."""
        return next((node for node, agent in self.agents.items() if agent.rank == rank), None)


CheckLevel = Literal["ok", "warning", "failed"]


class PreflightCheck(msgspec.Struct, frozen=True):
    """What one check of a node found."""

    name: str
    level: CheckLevel
    text: str
    fix: str = ""


class SharedCheck(PreflightCheck, frozen=True):
    """The same of one that tells of the file system of the run directory, and nothing of the node."""


class PreflightReference(msgspec.Struct, frozen=True):
    """`preflight.json`: what the head's own node looks like to it, for the others to compare."""

    plan_digest: str
    packages: dict[str, str | None]
