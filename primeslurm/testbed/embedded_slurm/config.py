"""Configuration of an embedded cluster: its specification, addresses, slurm.conf, gres.conf and site file."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.files import LONGEST_SOCKET
from primeslurm.recipe.site import Network, NodeKind, Site
from primeslurm.testbed.embedded_slurm import page_merging

# Most GPU nodes of a cluster in one of the `PLACES` regular places. One extra place fits larger clusters.
NARROW_NODES = 200
MAX_NODES = 512
MAX_CONTROL = 200
MAX_GPUS = 16
# Longest cluster name that is used unchanged as the prefix of node names.
MAX_PREFIX = 8
_NAME = re.compile(r"^[a-z][a-z0-9-]{0,30}$")

# Number of regular clusters that can be up on one machine at a time.
PLACES = 36
_NARROW_CONTROL = 50
_SUBNET = 250

# Slurm holds a requeued job back until the credentials of its last start have expired. Its default of 120 s leaves the
# cluster idle for long. A launch on a busy machine must still fit into this time.
CRED_EXPIRE_S = 10
# Time without a heartbeat after which a node is lost [s]; one second per node, if that is more. Agents read each
# other's files without delay, but they share the cores of one machine.
NODE_SILENT_S = 30
# Time in which all agents of a job must start [s]; `AGENT_START_S` per node, if that is more.
NODE_START_S = 300
AGENT_START_S = 2


def is_name(name: str) -> bool:
    """Return whether a name is valid for a cluster."""
    return _NAME.match(name) is not None


@dataclass(frozen=True)
class ClusterSpec:
    """Specification of an embedded cluster, with partition `gpu` and, for nodes without GPUs, partition `cpu`."""

    name: str
    directory: Path
    """Directory of all files that the cluster writes; `down` removes it."""
    runs: Path
    """Directory of runs in the site file. Neither `up` nor `down` touches it."""
    nodes: int = 4
    """Number of GPU nodes."""
    gpus_per_node: int = 8
    """Fake devices that Slurm counts and assigns. They cannot compute."""
    cpus_per_node: int = 16
    """Cores that each node reports to Slurm, whatever this machine has."""
    control_nodes: int = 1
    """Number of nodes without GPUs."""
    merge_pages: bool = False
    """Whether the kernel shares equal memory pages of the cluster's processes (`equal_pages`)."""

    def check(self) -> None:
        """Raise UsageError with all problems of this specification."""
        violations = []
        if not is_name(self.name):
            violations.append(
                Violation("name", self.name, "must be a-z, 0-9 and -, starting with a letter, at most 31 long")
            )
        for field, value, low, high in (
            ("nodes", self.nodes, 1, MAX_NODES),
            ("gpus_per_node", self.gpus_per_node, 0, MAX_GPUS),
            ("cpus_per_node", self.cpus_per_node, 1, 1024),
            ("control_nodes", self.control_nodes, 0, MAX_CONTROL if self.wide else _NARROW_CONTROL),
        ):
            if not low <= value <= high:
                violations.append(Violation(field, str(value), f"must be between {low} and {high}"))
        for field, path in (("directory", self.directory), ("runs", self.runs)):
            if not path.is_absolute() or re.search(r"[\s#\"'\\%]", str(path)):
                why = "must be an absolute path without spaces, quotes, # and %"
                violations.append(Violation(field, str(path), why))
        if not self.has_short_path:
            why = f"is longer than {self._longest_path} characters, too long for the Unix sockets in it"
            violations.append(Violation("directory", str(self.directory), why, "choose a shorter one"))
        if violations:
            raise UsageError(violations)

    @property
    def has_short_path(self) -> bool:
        """Whether the directory's path is short enough for the Unix sockets in it."""
        return len(str(self.directory)) <= self._longest_path

    @property
    def _longest_path(self) -> int:
        # The longest socket belongs to a job step: <directory>/spool/<node>/<node>_<job>.<step>, with up to 16 bytes of
        # numbers.
        return LONGEST_SOCKET - len(f"/spool/{self._prefix}-n001/{self._prefix}-n001_") - 16

    @property
    def wide(self) -> bool:
        """Whether the cluster needs the extra place for large clusters."""
        return self.nodes > NARROW_NODES

    @property
    def node_silent_s(self) -> int:
        """Time without a heartbeat after which head and Slurm consider a node lost [s]."""
        return max(NODE_SILENT_S, self.nodes + self.control_nodes)

    @property
    def node_start_s(self) -> int:
        """Time in which all agents of a job must send a heartbeat [s]."""
        return max(NODE_START_S, AGENT_START_S * (self.nodes + self.control_nodes))

    @property
    def cred_expire_s(self) -> int:
        # All tasks of a job must start within this time. With 10 s, 142 of 485 tasks did not.
        return self.node_silent_s if self.wide else CRED_EXPIRE_S

    @property
    def message_timeout_s(self) -> int:
        # Launching 518 nodes at once, srun got four answers after more than 100 s. Slurm warns about more than 100.
        return self.node_silent_s if self.wide else 30

    @property
    def munge_threads(self) -> int:
        # munged's documentation advises 10 threads if its socket fills up, as when hundreds of tasks start at once.
        return 10 if self.wide else 2

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def site_file(self) -> Path:
        return self.directory / "site.yaml"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    @property
    def gpu_names(self) -> list[str]:
        return [f"{self._prefix}-n{i:03d}" for i in range(1, self.nodes + 1)]

    @property
    def control_names(self) -> list[str]:
        return [f"{self._prefix}-c{i:03d}" for i in range(1, self.control_nodes + 1)]

    @property
    def _prefix(self) -> str:
        # Short, and different for every cluster: runs record bad nodes by name.
        if len(self.name) <= MAX_PREFIX:
            return self.name
        return f"{self.name[:3]}{zlib.crc32(self.name.encode()) & 0xFFF:03x}"


@dataclass(frozen=True)
class LoopbackPlace:
    """The loopback addresses and the block of ports of one cluster.

    slurmd and slurmctld listen on all addresses, so every node needs its own port. The blocks lie below
    `Site.port_base`, where the ports of runs begin.
    """

    index: int
    """0 to PLACES - 1; PLACES is the extra place for a large cluster."""

    @property
    def first_control(self) -> int:
        """Number of the first control node. GPU nodes count from 1."""
        return 1 + (MAX_NODES if self.index == PLACES else NARROW_NODES)

    def address(self, number: int) -> str:
        """Return the loopback address of node `number`."""
        if self.index == PLACES:
            return f"127.21.{number // _SUBNET}.{number % _SUBNET + 1}"
        return f"127.20.{self.index + 1}.{number}"

    @property
    def port(self) -> int:
        """Port of slurmctld. The port of node n is n higher."""
        return 10000 + 256 * self.index

    def ports(self, spec: ClusterSpec) -> list[int]:
        """Return all ports that the daemons of `spec` need."""
        first = self.port + self.first_control
        control = range(first, first + spec.control_nodes)
        return [self.port, *range(self.port + 1, self.port + 1 + spec.nodes), *control]


def addresses(spec: ClusterSpec, place: LoopbackPlace) -> dict[str, str]:
    """Return the loopback address of each node: GPU nodes from .1, control nodes (of a regular place) from .201."""
    gpu = {name: place.address(i) for i, name in enumerate(spec.gpu_names, start=1)}
    return gpu | {name: place.address(i) for i, name in enumerate(spec.control_names, start=place.first_control)}


def slurm_conf(spec: ClusterSpec, place: LoopbackPlace, hostname: str, memory_mb: int) -> str:
    """Return the text of slurm.conf for several nodes on one machine, with nothing shared with another cluster."""
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
        # Jobs in partition `urgent` preempt the others, so that tests can preempt a run.
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
    # One line per subnet, because Slurm expands ranges only in the last number of an address.
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
    """Return the text of gres.conf. Slurm takes the GPU numbers from the names of the character devices."""
    if not spec.gpus_per_node:
        return ""
    devices = _span(f"{spec.directory}/devices/gpu", 0, spec.gpus_per_node)
    return f"NodeName={_range(spec.gpu_names)} Name=gpu File={devices}\n"


def site(spec: ClusterSpec, place: LoopbackPlace) -> Site:
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
