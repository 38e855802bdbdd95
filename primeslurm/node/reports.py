"""What agents and head tell each other, through files in the attempt directory: `agents/<rank>.json`, `fleet.json`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

AGENT_ENDED = "its agent ended"
"""Why a node is lost whose agent has ended by itself, without an error."""


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


@dataclass(frozen=True)
class News:
    """Something that happened, for the journal."""

    kind: str
    fields: dict[str, Any]
    blamed: str | None = None
    """Name of a node that is to blame, for the bad-node ledger."""


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
    """Generation of its unit that it was last started in."""


class Fitness(StrEnum):
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
    agent_pid: int
    fitness: Fitness = Fitness.CHECKING
    unfit_because: str = ""
    node: int | None = None
    """The Plan's node that it plays; None while it is a spare."""
    ports: dict[str, dict[str, int]] = {}
    processes: dict[str, ProcessReport] = {}
    ended: bool = False
    error: str = ""


class UnitOrder(msgspec.Struct, frozen=True):
    """What the processes of a unit have to do: end what is of an older generation; start, unless held."""

    generation: int
    hold: bool


class FleetView(msgspec.Struct, frozen=True):
    """`fleet.json`: what the head tells every agent."""

    time: float
    ready: list[str] = []
    states: dict[str, str] = {}
    units: dict[str, UnitOrder] = {}
    """Units that were restarted at least once."""
    lost: list[str] = []
    """Processes that were given up: they end, and nothing waits for them."""
    ending: Ending | None = None
    release: bool = False
    """Set while ending: trainers are done (or out of time), everything else may stop."""
