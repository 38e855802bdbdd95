"""The Plan: one frozen object with the placement, ports, environment and command of every process.

`argv`, `env` and `files` may hold placeholders that `node.agent.node_context` fills in on the node:

- `${host}`: own address. `${port:http}`: own port. `${port:nixl-3}`: own port minus three.
- `${host:NAME}`, `${port:NAME:http}`, `${addr:NAME:http}`: address, port and `host:port` of process NAME.
- `${run_dir}`, `${run_id}`, `${attempt}`, `${attempt_dir}`, `${python}`, `${tmp}`, `${node}` (own index).
- `${key}`: a random word of the node agent. It makes names on the node's disk unpredictable for others.
- `${interface}`, `${hcas}`, `${nccl_interface}`, `${hca_ports}`, `${nccl_hcas}`, `${ucx_devices}`,
  `${ucx_devices_near}` (near the process's GPUs): the node's network.
- Only in `env`: `${secret}` and `${generate_token}` (`wire.transport.secret`). The agent hands these over after the
  start, so they are not in the environment of a process.

A variable whose value is empty after that is not set. A Plan never holds a host name or a secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import ConfigDict, Field

from primeslurm.base.errors import Violation
from primeslurm.plan.forecast import Estimate
from primeslurm.plan.supervision import MAX_RESTARTS, Health, HeartbeatLimits, Restart
from primeslurm.recipe.fields.section import Section
from primeslurm.records.heartbeats import NODE_HEARTBEAT_S

Role = Literal[
    "orchestrator",
    "environment",
    "trainer",
    "engine",
    "prefill",
    "decode",
    "router",
    "store",
    "teacher",
    "tinker",
    "tenant-host",
]
# Roles that run a vLLM server
VLLM_ROLES: tuple[Role, ...] = ("engine", "prefill", "decode", "teacher")
Level = Literal["error", "blocked", "warning", "note"]
NodeRole = Literal["control", "train", "inference", "prefill", "decode", "teacher", "environments"]

# File in the run directory with the output of a job's batch script, srun and agents, by Slurm's job id
JOB_OUTPUT = "slurm-{}.out"


class Process(Section):
    """One operating-system process on one node."""

    model_config = ConfigDict(populate_by_name=True)

    name: str  # unique in the Plan, for example decode-r0-1
    role: Role
    node: int  # global node index
    replica: int | None = None
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    log: str  # log file, relative to the attempt directory
    ports: dict[str, int] = {}
    """Preferred number of each port, by name. The agent probes it and publishes the number in use."""
    fixed_ports: tuple[str, ...] = ()  # names of ports that must have exactly these numbers
    gpus: tuple[int, ...] = ()  # indices of the node's GPUs that this process sees
    restart: Restart = "in_place"
    """in_place: its agent restarts it with back-off. unit: its restart group restarts. attempt: the attempt ends."""
    restart_group: str | None = Field(None, alias="unit")
    """Name of the group of processes that only work together, such as trainer ranks. None: it restarts alone."""
    max_restarts: int = MAX_RESTARTS
    health: Health | None = None
    heartbeats: HeartbeatLimits | None = Field(None, alias="beats")  # None: the process sends no heartbeats
    files: dict[str, str] = {}  # text of files to write before the start, with placeholders, by name under `${tmp}`
    scratch: tuple[str, ...] = ()
    """Directories on the node's disk that are created empty for the attempt and removed when it ends."""
    imports: tuple[str, ...] = ()
    """Modules that the agent may import once and share by fork, if several processes of the node name them."""
    after: tuple[str, ...] = ()
    """Processes that must have an address, and be ready if they have `health`, before this one starts."""


class Node(Section):
    """A node's role in the run. The head assigns an allocated node to it when the job runs (`records.fleet`).

    Node 0 is the head. It is always the job's first node.
    """

    index: int
    group: int
    role: NodeRole | Literal["all"]  # all: the processes of all roles share the node (`layout: one_node`).
    index_in_group: int
    processes: tuple[Process, ...] = ()


class HetGroup(Section):
    """One component of the batch job. The layouts `single` and `one_node` have exactly one."""

    index: int
    name: str
    nodes: int  # nodes requested from Slurm, including spares
    spares: int = 0  # nodes that replace failed ones of the component
    partition: str
    gres: str | None  # Generic resources per node, for example gpu:8. None: none are requested.
    gpus_per_node: str | None = None  # GPUs per node in place of `gres`, for example 8 or h200:8
    cpus_per_task: int
    mem: str | None = None  # memory per node
    mem_per_cpu: str | None = None  # memory per core, in place of `mem`
    constraint: str | None = None
    nodelist: str | None = None
    switches: str | None = None
    exclusive: bool = False

    @property
    def requested_gres(self) -> str | None:
        """Return the GPUs per node that the job requests, as a generic resource such as gpu:8."""
        return self.gres or (f"gpu:{self.gpus_per_node}" if self.gpus_per_node else None)


class Replica(Section):
    """One inference deployment behind one router."""

    index: int
    router: str
    engines: tuple[str, ...]
    nodes: tuple[int, ...]


class JobOptions(Section):
    """Options of the batch job as a whole."""

    name: str
    time: str
    time_min: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    comment: str | None = None
    exclude: str | None = None
    avoid: tuple[str, ...] = ()  # Nodes that failed recently. They are excluded, too.
    dependency: str | None = None
    mail_user: str | None = None
    mail_types: tuple[str, ...] = ()
    licenses: str | None = None
    nice: int | None = None
    priority: int | None = None
    requeue: bool = True
    signal_s: int = 120
    extra: tuple[str, ...] = ()  # other sbatch options, set on every component
    modules: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()  # additional options of the job's srun
    launcher: tuple[str, ...] = ()  # command prefix that enters a container

    @property
    def excluded(self) -> str | None:
        return ",".join([*([self.exclude] if self.exclude else []), *self.avoid]) or None


class Totals(Section):
    """Sums that are always printed."""

    nodes: int  # working nodes, without spares
    spares: int = 0
    gpus: int  # GPUs of the job, including those of spare nodes
    trainer_gpus: int
    engines: int
    inference_nodes: int
    routers: int
    teacher_engines: int = 0
    environment_nodes: int = 0  # 0: environments run on the head node


class WeightTransport(Section):
    """How new weights reach the engines."""

    transport: Literal["filesystem", "nccl"]
    reason: str


class Finding(Section):
    """A result of a check of the Plan."""

    level: Level  # error: refused. blocked: valid, but a real submit is refused here and now. warning, note: advice.
    field: str
    text: str
    fix: str = ""
    value: str = ""  # Value of the field. Empty if the text names it or the field is not set.

    def __str__(self) -> str:
        given = f" = {self.value}" if self.value else ""
        return f"{self.level}: {self.field}{given}: {self.text}" + (f" ({self.fix})" if self.fix else "")


def as_findings(violations: Iterable[Violation], level: Level) -> list[Finding]:
    return [Finding(level=level, field=v.field, value=v.value, text=v.why, fix=v.fix) for v in violations]


class Plan(Section):
    """A recipe and a site with every decision made. The same input gives the same bytes."""

    schema_: Literal[1] = Field(1, alias="schema")
    run: str
    run_dir: str
    task: Literal["rl", "sft", "serve", "eval", "tenants"]
    layout: Literal["het", "single", "one_node"]
    executor: Literal["slurm", "local"]
    emulated: bool = False
    """Emulated processes replace engines, trainer ranks and environments, so no model files are needed."""
    device: Literal["cuda", "cpu"]
    python: str
    job: JobOptions
    groups: tuple[HetGroup, ...]
    nodes: tuple[Node, ...]
    replicas: tuple[Replica, ...]
    totals: Totals
    env: dict[str, str]  # environment of every process on every node
    library_path: tuple[str, ...] = ()  # directories at the front of every LD_LIBRARY_PATH
    interface: str | None = None
    hcas: tuple[str, ...] = ()  # HCAs from the site file. Empty: each node uses its active ones.
    addresses: dict[str, str] = {}  # address of each node by name, from the site file
    pass_env: tuple[str, ...] = ()
    """Variables that must be set at submission. Slurm and the agents pass them on. No file holds their values."""
    stall_timeout_s: int
    max_attempts: int
    node_silent_s: int = 90  # a node without a heartbeat for this long [s] is lost
    node_start_s: int = 300
    """Longest time between the starts of the first and any other agent [s]. Nodes may have to pull images first."""
    bad_node_hours: int = 24  # hours for which later jobs avoid a failed node
    prometheus: Literal["token", "open", "off"] = "token"  # access to the metrics that the head serves
    weight_transport: WeightTransport | None = None  # None in plans of older versions
    findings: tuple[Finding, ...] = ()
    estimate: Estimate | None = None  # None if the model's shape is unknown

    def to_json(self) -> str:
        """Return canonical JSON: fields in definition order, two-space indent, trailing newline."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"

    def processes(self) -> tuple[Process, ...]:
        return tuple(process for node in self.nodes for process in node.processes)

    @property
    def allocated(self) -> int:
        """Return the number of nodes of the job, including spares. One agent runs on each."""
        return sum(group.nodes for group in self.groups)

    @property
    def heartbeat_s(self) -> float:
        """Return the longest time between two heartbeats of the head and of an agent [s]."""
        return max(NODE_HEARTBEAT_S, self.node_silent_s / 90)

    @property
    def survives_nodes(self) -> bool:
        """Return whether the job keeps running after it loses a node (`--no-kill`)."""
        # Slurm counts a lost node against every component of a heterogeneous job. If a component has a single node
        # left, Slurm requeues that component alone and the job falls apart. Without --no-kill, it requeues the whole
        # job at once.
        return all(group.nodes > 1 for group in self.groups)

    def ranks(self, group: int) -> range:
        """Return the task ranks of a group's agents. Groups are in order, with one task per node."""
        first = sum(g.nodes for g in self.groups[:group])
        return range(first, first + self.groups[group].nodes)

    def group_of_rank(self, rank: int) -> HetGroup:
        """Return the group that an agent's node belongs to. Raises KeyError if the job has no such rank."""
        for group in self.groups:
            if rank in self.ranks(group.index):
                return group
        raise KeyError(rank)

    def process(self, name: str) -> Process:
        """Return a process by name. Raises KeyError."""
        for process in self.processes():
            if process.name == name:
                return process
        raise KeyError(name)
