"""Parse Slurm's reports on partitions, nodes and reservations: states, limits and resources. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from primeslurm.recipe.fields.types import minutes

# sinfo format: name, partition, state, cores, memory [MiB], generic resources, features
NODE_FORMAT = "%N|%R|%t|%c|%m|%G|%f"
# States that last until somebody repairs the node
_BROKEN = ("down", "drain", "drng", "fail", "err", "inval", "futr", "npc", "block")
# States that end without a repair: a reservation, maintenance, a reboot, or a daemon that has not reported yet
_AWAY = ("resv", "maint", "boot", "rebo", "unk")
_COUNT = re.compile(r"\d+[KMGTPkmgtp]?")
_SUFFIXES = "*~#!%$@^-+"
_UNLIMITED = frozenset({"", "UNLIMITED", "INFINITE", "NONE", "N/A", "(null)", "n/a"})


def plain_state(state: str) -> str:
    """Return sinfo's short word for a state without the signs after it, for example idle for idle~."""
    return state.rstrip(_SUFFIXES)


def is_broken(state: str) -> bool:
    """Return whether a node in this state (sinfo's short word) needs a repair before it runs jobs."""
    return state.startswith(_BROKEN)


def is_usable(state: str, *, reserved: bool = False) -> bool:
    """Return whether a node in this state runs jobs now or after its current job.

    Args:
        state: sinfo's short word with the signs after it. `*` means that the node does not respond, `$` that it is in
            maintenance, `^` that it reboots. Planned (`plnd`, `-`) and powered-down (`~`) nodes start jobs.
        reserved: whether the job runs in a reservation that includes the node.
    """
    if is_broken(state) or "*" in state or "^" in state:
        return False
    return (reserved and state.startswith(("resv", "maint"))) or not (state.startswith(_AWAY) or "$" in state)


@dataclass(frozen=True)
class PartitionNode:
    """A node of a partition."""

    name: str
    state: str  # sinfo's short word, with the signs after it
    cpus: int
    memory_mib: int
    gres: str  # sinfo's text, for example gpu:h100:8(S:0-1). Empty: none.
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Partition:
    """A partition and its rules for jobs. None: no limit, or everybody."""

    name: str
    state: str  # UP, DOWN, DRAIN or INACTIVE
    nodes: tuple[PartitionNode, ...] = ()
    max_minutes: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_mib: int | None = None  # per node
    groups: frozenset[str] | None = None
    accounts: frozenset[str] | None = None
    denied_accounts: frozenset[str] = frozenset()
    qos_names: frozenset[str] | None = None  # QOS that jobs may use
    denied_qos: frozenset[str] = frozenset()
    qos: str = ""  # QOS whose limits hold for all jobs of the partition
    root_only: bool = False
    needs_reservation: bool = False


@dataclass(frozen=True)
class Reservation:
    """A reservation of nodes."""

    name: str
    start: str
    end: str
    nodes: str  # host list
    maintenance: bool
    active: bool


@dataclass(frozen=True)
class Gres:
    """A generic resource of a node or of a request."""

    name: str
    type: str  # empty: any type
    count: int


def parse_gres(text: str) -> list[Gres]:
    """Parse what sinfo prints of a node's generic resources, or what follows --gres=.

    Counts with a unit, such as bandwidth:4G, are left out: nothing here asks for them.
    """
    resources = []
    for entry in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = [part for part in entry.strip().split(":") if part not in ("no_consume", "null")]
        count = rest.pop() if rest and _COUNT.fullmatch(rest[-1]) else "1"  # 1g.5gb is the type of a slice of a GPU
        if name and count.isdigit():
            resources.append(Gres(name, ":".join(rest), int(count)))
    return resources


def count_of(gres: str, wanted: Gres) -> int:
    """Return how many of a generic resource a node has, of the wanted type if one is given."""
    return sum(each.count for each in parse_gres(gres) if each.name == wanted.name and wanted.type in ("", each.type))


def parse_partitions(text: str, rows: Iterable[Sequence[str]]) -> dict[str, Partition]:
    """Parse `scontrol --all --oneliner show partition` and rows of sinfo's `NODE_FORMAT`."""
    nodes: dict[str, dict[str, PartitionNode]] = {}
    for name, partition, state, cpus, memory, gres, features in rows:
        node = PartitionNode(
            name, state, _number(cpus) or 0, _number(memory) or 0, _words(gres), _names(features) or frozenset()
        )
        nodes.setdefault(partition, {})[name] = node
    partitions = {}
    for value in map(fields, text.splitlines()):
        if "PartitionName" in value:
            name = value["PartitionName"]
            partitions[name] = _partition(name, value, tuple(nodes.get(name, {}).values()))
    return partitions


def _partition(name: str, value: Mapping[str, str], nodes: tuple[PartitionNode, ...]) -> Partition:
    return Partition(
        name=name,
        state=value.get("State", "UP"),
        nodes=nodes,
        max_minutes=parse_minutes(value.get("MaxTime", "")),
        min_nodes=_number(value.get("MinNodes", "")) or 0,
        max_nodes=_number(value.get("MaxNodes", "")),
        max_cpus_per_node=_number(value.get("MaxCPUsPerNode", "")),
        max_memory_mib=_number(value.get("MaxMemPerNode", "")),
        groups=_names(value.get("AllowGroups", "ALL")),
        accounts=_names(value.get("AllowAccounts", "ALL"), folded=True),
        denied_accounts=_names(value.get("DenyAccounts", ""), folded=True) or frozenset(),
        qos_names=_names(value.get("AllowQos", "ALL"), folded=True),
        denied_qos=_names(value.get("DenyQos", ""), folded=True) or frozenset(),
        qos=_words(value.get("QoS", "")),
        root_only=value.get("RootOnly") == "YES",
        needs_reservation=value.get("ReqResv") == "YES",
    )


def parse_reservations(text: str) -> list[Reservation]:
    reservations = []
    for line in text.splitlines():
        value = fields(line)
        if name := value.get("ReservationName"):
            nodes, flags = _words(value.get("Nodes", "")), value.get("Flags", "").split(",")
            times = value.get("StartTime", ""), value.get("EndTime", "")
            reservations.append(Reservation(name, *times, nodes, "MAINT" in flags, value.get("State") == "ACTIVE"))
    return reservations


def fields(line: str) -> dict[str, str]:
    # A value with spaces (Comment) may contain text like a field. It comes late in the line, so the first match wins.
    return dict(reversed(re.findall(r"(?:^| )([\w:/]+)=(\S*)", line)))


def parse_minutes(value: str) -> int | None:
    """Return a time limit in whole minutes; None if unlimited."""
    if value in _UNLIMITED:
        return None
    try:
        return minutes(value)
    except ValueError:
        return None


def _number(value: str) -> int | None:
    digits = value.rstrip("+")
    return int(digits) if digits.isdigit() else None


def _words(value: str) -> str:
    return "" if value in _UNLIMITED else value


def _names(value: str, *, folded: bool = False) -> frozenset[str] | None:
    """Parse a list of names; None means everybody. Slurm ignores the case of `folded` names."""
    if value == "ALL" or value in _UNLIMITED:
        return None
    return frozenset((value.lower() if folded else value).split(","))
