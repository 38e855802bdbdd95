"""Events of nodes and agents, and of the attempt as a whole."""

from __future__ import annotations

from primeslurm.records.fleet import PreflightCheck
from primeslurm.records.record import Event


class AgentStarted(Event, frozen=True, tag="agent_started"):
    """An agent runs."""

    node: str = ""
    address: str = ""


class AgentFailed(Event, frozen=True, tag="agent_failed"):
    """An agent ended with an error of its own."""

    error: str = ""


class HeadFailed(Event, frozen=True, tag="head_failed"):
    """The head ended with an error of its own."""

    error: str = ""


class HeartbeatFailed(Event, frozen=True, tag="heartbeat_failed"):
    """An agent could not write its heartbeat."""

    error: str = ""


class PublishFailed(Event, frozen=True, tag="publish_failed"):
    """The head could not write fleet.json."""

    error: str = ""


class FileSystemFault(Event, frozen=True, tag="file_system_fault"):
    """By the head: something is wrong with the shared file system, and the run waits; without words: it is over."""

    what: str = ""


class PreflightDone(Event, frozen=True, tag="preflight"):
    """An agent has looked its node over."""

    node: str
    fitness: str
    seconds: float = 0.0
    checks: list[PreflightCheck] = []


class GpuFailed(Event, frozen=True, tag="gpu_failed"):
    """A GPU was found broken after the death of a process that used it."""

    node: str
    checks: list[PreflightCheck] = []
    """Those that failed."""


class NodesAssigned(Event, frozen=True, tag="seated", omit_defaults=True):
    """By the head: every node of the Plan is played. By an agent: it plays one."""

    nodes: list[str] = []
    """The head's: names, in order of the Plan's nodes."""
    spares: list[str] = []
    """The head's: names of those that are left over."""
    node: str = ""
    """An agent's: its own name."""
    index: int | None = None
    """An agent's: the Plan's node that it plays."""
    role: str = ""
    """An agent's: role of that node."""
    generation: int = 0
    """An agent's: generation of the assignment that says so."""


class AddressesPublished(Event, frozen=True, tag="addresses"):
    """The head wrote addresses.json."""

    generation: int
    lost: list[str] = []


class NodeLost(Event, frozen=True, tag="node_lost"):
    """A node is not used any more in this attempt."""

    node: str
    rank: int | None = None
    reason: str = ""


class NodeReplaced(Event, frozen=True, tag="node_replaced"):
    """A spare takes the place of a lost node."""

    node: str
    by: str
    index: int | None = None
    """The Plan's node that it plays from now on."""


class ProcessesMoved(Event, frozen=True, tag="moved"):
    """Other nodes run what a lost one ran."""

    node: str
    """The lost one."""
    processes: list[str]
    to: list[str] = []
    """Names of the nodes that run them from now on."""


class ProcessesGivenUp(Event, frozen=True, tag="given_up"):
    """The attempt goes on without some processes."""

    processes: list[str]
    reason: str = ""


class ProcessesRestarted(Event, frozen=True, tag="unit_restart"):
    """All processes of a restart group are started again."""

    unit: str
    """Name of the restart group."""
    generation: int = 0
    reason: str = ""


class LaunchedAgain(Event, frozen=True, tag="launched_again"):
    """The batch script starts all agents again, on the nodes that are left."""

    without: list[str] = []


class AttemptEnds(Event, frozen=True, tag="ending"):
    """By the head or the batch script: the attempt ends from now on. By an agent: it has heard of that."""

    outcome: str
    reason: str = ""
    suspect: str = ""


class AttemptEnded(Event, frozen=True, tag="ended"):
    """The end is on record."""

    outcome: str
    requeued: bool = False
    why_not: str = ""


class EndNotRecorded(Event, frozen=True, tag="end_not_recorded"):
    """end.json could not be written."""

    error: str = ""


class BadNodeNotRecorded(Event, frozen=True, tag="bad_node_not_recorded"):
    """The ledger of bad nodes could not be written."""

    node: str
    error: str = ""


class PortTaken(Event, frozen=True, tag="port_taken"):
    """Another user of a node listens where a process of the run was to listen: it gets another port."""

    name: str
    port: int
    instead: int


NodeEvent = (
    AgentStarted
    | AgentFailed
    | HeadFailed
    | HeartbeatFailed
    | PublishFailed
    | FileSystemFault
    | PreflightDone
    | GpuFailed
    | NodesAssigned
    | AddressesPublished
    | NodeLost
    | NodeReplaced
    | ProcessesMoved
    | ProcessesGivenUp
    | ProcessesRestarted
    | LaunchedAgain
    | AttemptEnds
    | AttemptEnded
    | EndNotRecorded
    | BadNodeNotRecorded
    | PortTaken
)
