"""Events of nodes and agents, and of the attempt as a whole."""

from __future__ import annotations

from primeslurm.records.fleet import PreflightCheck
from primeslurm.records.record import Event


class AgentStarted(Event, frozen=True, tag="agent_started"):
    """An agent runs."""

    node: str = ""
    address: str = ""


class AgentFailed(Event, frozen=True, tag="agent_failed"):
    """An agent ended with an error."""

    error: str = ""


class HeadFailed(Event, frozen=True, tag="head_failed"):
    """The head ended with an error."""

    error: str = ""


class HeartbeatFailed(Event, frozen=True, tag="heartbeat_failed"):
    """An agent could not write its heartbeat."""

    error: str = ""


class PublishFailed(Event, frozen=True, tag="publish_failed"):
    """The head could not write fleet.json."""

    error: str = ""


class FileSystemFault(Event, frozen=True, tag="file_system_fault"):
    """The head noticed a fault of the shared file system, which the run waits out, or the end of the fault."""

    what: str = ""  # empty at the end of the fault


class PreflightDone(Event, frozen=True, tag="preflight"):
    """An agent has completed the preflight of its node."""

    node: str
    fitness: str
    seconds: float = 0.0
    checks: list[PreflightCheck] = []


class GpuFailed(Event, frozen=True, tag="gpu_failed"):
    """A GPU was found broken after a process that used it had died."""

    node: str
    checks: list[PreflightCheck] = []  # the failed checks


class NodesAssigned(Event, frozen=True, tag="seated", omit_defaults=True):
    """The head has assigned all nodes of the Plan, or an agent has taken over its node."""

    nodes: list[str] = []  # from the head: node names in the order of the Plan
    spares: list[str] = []  # from the head: names of the spare nodes
    node: str = ""  # from an agent: its node's name
    index: int | None = None  # from an agent: Plan index of its node
    role: str = ""  # from an agent: role of that node
    generation: int = 0  # from an agent: generation of the assignment


class AddressesPublished(Event, frozen=True, tag="addresses"):
    """The head wrote addresses.json."""

    generation: int
    lost: list[str] = []


class NodeLost(Event, frozen=True, tag="node_lost"):
    """The attempt stops using a node."""

    node: str
    rank: int | None = None
    reason: str = ""


class NodeReplaced(Event, frozen=True, tag="node_replaced"):
    """A spare replaces a lost node."""

    node: str
    by: str
    index: int | None = None  # Plan index of the node


class ProcessesMoved(Event, frozen=True, tag="moved"):
    """Other nodes take over the processes of a lost node."""

    node: str  # the lost node
    processes: list[str]
    to: list[str] = []  # names of the nodes that run them now


class ProcessesGivenUp(Event, frozen=True, tag="given_up"):
    """The attempt continues without some processes."""

    processes: list[str]
    reason: str = ""


class ProcessesRestarted(Event, frozen=True, tag="unit_restart"):
    """All processes of a restart group restart."""

    unit: str  # name of the restart group
    generation: int = 0
    reason: str = ""


class LaunchedAgain(Event, frozen=True, tag="launched_again"):
    """The batch script starts all agents again, on the remaining nodes."""

    without: list[str] = []


class AttemptEnds(Event, frozen=True, tag="ending"):
    """The head or the batch script begins to end the attempt, or an agent learns of it."""

    outcome: str
    reason: str = ""
    suspect: str = ""


class AttemptEnded(Event, frozen=True, tag="ended"):
    """The end of the attempt is recorded."""

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
    """Another user listens on a port that a process was about to use. The process gets another port."""

    name: str
    port: int
    instead: int
