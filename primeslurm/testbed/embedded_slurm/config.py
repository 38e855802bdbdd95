"""What the embedded cluster's configuration files say. Pure: specification in, text out."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.files import LONGEST_SOCKET
from primeslurm.recipe.site import Network, NodeKind, Site
from primeslurm.testbed.embedded_slurm import page_merging

NARROW_NODES = 200
"""A cluster of so many GPU nodes, and 50 without, fits into one of many places; larger ones have one of their own."""
MAX_NODES = 512
MAX_CONTROL = 200
MAX_GPUS = 16
MAX_PREFIX = 8
"""Node names begin with the cluster's name, if it is no longer than this."""
_NAME = re.compile(r"^[a-z][a-z0-9-]{0,30}$")

PLACES = 36
_NARROW_CONTROL = 50
_SUBNET = 250

CRED_EXPIRE_S = 10
"""Slurm holds a requeued job back until the credentials of its last start have expired. Its default of 120 s is a long
time to look at an idle cluster; a launch on a busy machine still has to fit into this."""
NODE_SILENT_S = 30
"""A cluster's nodes share a local file system, which shows every change at once, but also the cores of one machine: a
second a node, where that is more."""
NODE_START_S = 300
"""What other sites give all agents of a job to start."""
AGENT_START_S = 2
"""For each node, where that is more: agents start on the cores of one machine, beside those that run already."""


def is_name(name: str) -> bool:
    """Tell whether a cluster may have a name."""
    return _NAME.match(name) is not None


@dataclass(frozen=True)
class ClusterSpec:
    """An embedded cluster: `nodes` GPU nodes in partition gpu, `control_nodes` without GPUs in partition cpu."""

    name: str
    directory: Path
    """Everything the cluster writes is in here; `down` removes it."""
    runs: Path
    """Directory of runs named in the site file. It is not created, and `down` leaves it alone."""
    nodes: int = 4
    gpus_per_node: int = 8
    """Fake devices: Slurm counts and assigns them, nothing can compute on them."""
    cpus_per_node: int = 16
    """What a node claims to have, whatever this machine has."""
    control_nodes: int = 1
    merge_pages: bool = False
    """The kernel keeps equal pages of its processes once (`equal_pages`)."""

    def check(self) -> None:
        """Raise UsageError with everything that is wrong with this specification."""
        found = []
        if not is_name(self.name):
            found.append(
                Violation("name", self.name, "must be a-z, 0-9 and -, starting with a letter, at most 31 long")
            )
        for field, value, low, high in (
            ("nodes", self.nodes, 1, MAX_NODES),
            ("gpus_per_node", self.gpus_per_node, 0, MAX_GPUS),
            ("cpus_per_node", self.cpus_per_node, 1, 1024),
            ("control_nodes", self.control_nodes, 0, MAX_CONTROL if self.wide else _NARROW_CONTROL),
        ):
            if not low <= value <= high:
                found.append(Violation(field, str(value), f"must be between {low} and {high}"))
        for field, path in (("directory", self.directory), ("runs", self.runs)):
            if not path.is_absolute() or re.search(r"[\s#\"'\\%]", str(path)):
                found.append(Violation(field, str(path), "must be an absolute path without spaces, quotes, # and %"))
        if not self.has_short_path:
            why = f"is longer than {self._longest_path} characters, too long for the Unix sockets in it"
            found.append(Violation("directory", str(self.directory), why, "choose a shorter one"))
        if found:
            raise UsageError(found)

    @property
    def has_short_path(self) -> bool:
        """Whether Unix sockets can be made in the directory."""
        return len(str(self.directory)) <= self._longest_path

    @property
    def _longest_path(self) -> int:
        # The longest socket is that of a job's step: <directory>/spool/<node>/<node>_<job>.<step>, up to 16 bytes of
        # numbers.
        return LONGEST_SOCKET - len(f"/spool/{self._prefix}-n001/{self._prefix}-n001_") - 16

    @property
    def wide(self) -> bool:
        """Whether it needs the place for large clusters."""
        return self.nodes > NARROW_NODES

    @property
    def node_silent_s(self) -> int:
        """Seconds after which a silent node is lost, to the head of a run and to Slurm."""
        return max(NODE_SILENT_S, self.nodes + self.control_nodes)

    @property
    def node_start_s(self) -> int:
        """Seconds within which all agents of a job must have been heard of."""
        return max(NODE_START_S, AGENT_START_S * (self.nodes + self.control_nodes))

    @property
    def cred_expire_s(self) -> int:
        """Seconds within which all tasks of a job must have been started: 142 of 485 had not, in 10."""
        return self.node_silent_s if self.wide else CRED_EXPIRE_S

    @property
    def message_timeout_s(self) -> int:
        """Seconds for the answer to a message: with 518 nodes launched at once, srun had four after more than 100.

        Slurm calls more than 100 too high.
        """
        return self.node_silent_s if self.wide else 30

    @property
    def munge_threads(self) -> int:
        """Threads of munged; 10 is its own advice where its socket is full, as when hundreds of tasks are launched."""
        return 10 if self.wide else 2

    @property
    def slurm_conf(self) -> Path:
        """Path of slurm.conf."""
        return self.directory / "slurm.conf"

    @property
    def site_file(self) -> Path:
        """Path of the generated site file."""
        return self.directory / "site.yaml"

    @property
    def munge_socket(self) -> Path:
        """Path of this cluster's own munge socket."""
        return self.directory / "munge" / "socket"

    @property
    def gpu_names(self) -> list[str]:
        """Names of the GPU nodes."""
        return [f"{self._prefix}-n{i:03d}" for i in range(1, self.nodes + 1)]

    @property
    def control_names(self) -> list[str]:
        """Names of the control nodes."""
        return [f"{self._prefix}-c{i:03d}" for i in range(1, self.control_nodes + 1)]

    @property
    def _prefix(self) -> str:
        """Short, and different for every cluster: runs remember bad nodes by their names."""
        if len(self.name) <= MAX_PREFIX:
            return self.name
        return f"{self.name[:3]}{zlib.crc32(self.name.encode()) & 0xFFF:03x}"


@dataclass(frozen=True)
class LoopbackPlace:
    """Where a cluster lives among others on this machine: its part of the loopback network and its block of ports.

    slurmd and slurmctld listen on all addresses, so ports must differ even between nodes. The blocks lie below
    `Site.port_base`, from where runs take theirs.
    """

    index: int
    """0 to PLACES - 1; PLACES: the one for a large cluster."""

    @property
    def first_control(self) -> int:
        """Number of the first control node; GPU nodes count from 1."""
        return 1 + (MAX_NODES if self.index == PLACES else NARROW_NODES)

    def address(self, number: int) -> str:
        """Return the loopback address of a node."""
        if self.index == PLACES:
            return f"127.21.{number // _SUBNET}.{number % _SUBNET + 1}"
        return f"127.20.{self.index + 1}.{number}"

    @property
    def port(self) -> int:
        """Port of slurmctld. That of a node is its number more."""
        return 10000 + 256 * self.index

    def ports(self, spec: ClusterSpec) -> list[int]:
        """Return all ports that the daemons of `spec` need here."""
        first = self.port + self.first_control
        control = range(first, first + spec.control_nodes)
        return [self.port, *range(self.port + 1, self.port + 1 + spec.nodes), *control]


def addresses(spec: ClusterSpec, place: LoopbackPlace) -> dict[str, str]:
    """Node name to loopback address; GPU nodes count from .1, control nodes (in a usual place) from .201."""
    gpu = {name: place.address(i) for i, name in enumerate(spec.gpu_names, start=1)}
    return gpu | {name: place.address(i) for i, name in enumerate(spec.control_names, start=place.first_control)}


def slurm_conf(spec: ClusterSpec, place: LoopbackPlace, hostname: str, memory_mb: int) -> str:
    """Write slurm.conf: what makes several nodes on one machine work, and nothing shared with another cluster.

    Args:
        spec: what the user asked for.
        place: the loopback addresses and ports of the cluster.
        hostname: of this machine.
        memory_mb: of this machine, in MB.

    Returns:
        Its text.
    """
    directory = spec.directory
    lines = [
        f"ClusterName={spec.name}",
        f"SlurmctldHost={hostname}(127.0.0.1)",
        f"SlurmctldPort={place.port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={spec.munge_socket},cred_expire={spec.cred_expire_s}",
        "CredType=cred/munge",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/pid/slurmctld",
        f"SlurmdPidFile={directory}/pid/%n",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/%n.log",
        "MailProg=/bin/true",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        f"MessageTimeout={spec.message_timeout_s}",
        f"SlurmdTimeout={spec.node_silent_s}",
        "KillWait=30",
        "MinJobAge=3600",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=1,bf_hetjob_immediate",
        # The urgent partition preempts the others: a job there shows what preemption does to a run.
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SlurmctldParameters=preempt_send_user_signal",
    ]
    resources = f"CPUs={spec.cpus_per_node} RealMemory={memory_mb} State=UNKNOWN"
    gres = f"Gres=gpu:{spec.gpus_per_node} " if spec.gpus_per_node else ""
    lines += _node_lines(hostname, spec.gpu_names, place, 1, gres + resources)
    usual = "PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=INFINITE State=UP"
    gpu_range, control_range = _range(spec.gpu_names), _range(spec.control_names)
    lines.append(f"PartitionName=gpu Nodes={gpu_range} Default=YES {usual}")
    lines.append(f"PartitionName=urgent Nodes={gpu_range} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP")
    if spec.control_nodes:
        lines += _node_lines(hostname, spec.control_names, place, place.first_control, resources)
        lines.append(f"PartitionName=cpu Nodes={control_range} {usual}")
    return "\n".join(lines) + "\n"


def _node_lines(hostname: str, names: list[str], place: LoopbackPlace, first: int, resources: str) -> list[str]:
    """One line for the nodes of each subnet: Slurm counts in the last number of an address alone."""
    subnets: dict[str, list[tuple[str, int]]] = {}
    for number, name in enumerate(names, start=first):
        subnets.setdefault(place.address(number).rpartition(".")[0], []).append((name, number))
    lines = []
    for subnet, nodes in subnets.items():
        here, numbers = [name for name, _ in nodes], [number for _, number in nodes]
        addresses = _span(f"{subnet}.", int(place.address(numbers[0]).rpartition(".")[2]), len(nodes))
        ports = _span("", place.port + numbers[0], len(nodes))
        lines.append(f"NodeName={_range(here)} NodeHostname={hostname} NodeAddr={addresses} Port={ports} {resources}")
    return lines


def _span(prefix: str, first: int, count: int) -> str:
    return f"{prefix}[{first}-{first + count - 1}]" if count > 1 else f"{prefix}{first}"


def _range(names: list[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{names[0][:-3]}[{names[0][-3:]}-{names[-1][-3:]}]"


def gres_conf(spec: ClusterSpec) -> str:
    """Text of gres.conf. Slurm wants character devices and takes the numbers from their names."""
    if not spec.gpus_per_node:
        return ""
    devices = _span(f"{spec.directory}/devices/gpu", 0, spec.gpus_per_node)
    return f"NodeName={_range(spec.gpu_names)} Name=gpu File={devices}\n"


def site(spec: ClusterSpec, place: LoopbackPlace) -> Site:
    """Return the site file's content."""
    default = NodeKind(partition="gpu", gpus=spec.gpus_per_node, cpus=spec.cpus_per_node)
    nodes = {"default": default}
    if spec.control_nodes:
        nodes = {"control": NodeKind(partition="cpu", gpus=0, cpus=spec.cpus_per_node), **nodes}
    return Site(
        schema=1,
        name=spec.name,
        env=page_merging.SAME_HASHES if spec.merge_pages else {},
        device="cpu",
        runs=str(spec.runs),
        slurm_conf=str(spec.slurm_conf),
        nodes=nodes,
        network=Network(addresses=addresses(spec, place)),
        node_silent_s=spec.node_silent_s,
        node_start_s=spec.node_start_s,
    )
