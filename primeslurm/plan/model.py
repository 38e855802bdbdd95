"""The Plan: the one frozen object that decides placement, ports, environment and commands.

Strings in `argv` and `env` may hold placeholders that only the node knows, filled in by `node.agent.node_context`:
`${host}` own address, `${port:http}` own port, `${port:nixl-3}` own port minus three, `${host:NAME}` address of process
NAME, `${port:NAME:http}` its port, `${addr:NAME:http}` its `host:port`, and the values `${run_dir}`, `${attempt}`,
`${attempt_dir}`, `${run_id}`, `${python}`, `${tmp}`, `${node}` (own index), `${key}` (a random word of the node's
agent, which makes names on its disk unknown to others), and of the node's network `${interface}`, `${hcas}`,
`${nccl_interface}`, `${hca_ports}`, `${nccl_hcas}`, `${ucx_devices}`, `${ucx_devices_near}` (near to the process's
GPUs). A variable of the environment that comes out empty is not set. Only in `env` also `${secret}` and
`${generate_token}` (`wire.transport.secret`): such variables are handed over, and are not in the environment that a
process is started with. A host name or a secret never appears in a Plan.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from primeslurm.plan.forecast import Estimate
from primeslurm.recipe.fields.section import Section

Role = Literal["orchestrator", "environment", "trainer", "engine", "prefill", "decode", "router", "store", "teacher"]
Restart = Literal["in_place", "unit", "attempt"]
VLLM_ROLES: tuple[Role, ...] = ("engine", "prefill", "decode", "teacher")
"""Roles whose processes are vLLM's servers."""
Level = Literal["error", "blocked", "warning", "note"]
NodeRole = Literal["control", "train", "inference", "prefill", "decode", "teacher", "environments"]

JOB_OUTPUT = "slurm-{}.out"
"""What the batch script, srun and the agents of a job of Slurm print, by the job's id; in the run directory."""

MAX_RESTARTS = 5
"""Restarts before a process or restart group is given up. Not configurable: a process that ran for five minutes gets a
new budget (`node.agent.supervision`)."""


class Health(Section):
    """How a process shows that it is ready: HTTP 200 on `path` of port `port`."""

    port: str
    path: str = "/health"
    start_timeout_s: int = 1800
    """Longest time from start to the first 200."""
    hang_timeout_s: int = 60
    """A process that was ready and gives no HTTP answer at all for this long hangs, and is restarted."""


class HeartbeatLimits(Section):
    """Timeouts of the heartbeats that a process's main loop sends (`records.heartbeats`)."""

    start_timeout_s: int = 1800
    """Longest time from start to the first heartbeat."""
    hang_timeout_s: int = 300
    """Longest time between two heartbeats, unless the process has announced a longer phase."""


class Process(Section):
    """One operating-system process on one node."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    """Unique in the Plan, for example decode-r0-1."""
    role: Role
    node: int
    """Global node index."""
    replica: int | None = None
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    log: str
    """Log file relative to the attempt directory."""
    ports: dict[str, int] = {}
    """Port name to preferred number; the agent probes and publishes the number really used."""
    gpus: tuple[int, ...] = ()
    """Indices of the node's GPUs that this process sees."""
    restart: Restart = "in_place"
    """in_place: restarted by its agent with back-off. unit: together with its restart group, `unit`. attempt: its
    death ends the attempt."""
    unit: str | None = None
    """Name of its restart group, if it has one: processes that only work together, such as ranks of an expert-parallel
    group or of the trainer."""
    max_restarts: int = MAX_RESTARTS
    health: Health | None = None
    heartbeats: HeartbeatLimits | None = Field(None, alias="beats")
    """None: it sends no heartbeats."""
    files: dict[str, str] = {}
    """Files written before it starts: name under `${tmp}` to text, with placeholders."""
    scratch: tuple[str, ...] = ()
    """Directories on the node's own disk: made empty when the attempt begins, removed when it ends."""
    imports: tuple[str, ...] = ()
    """Modules that all processes of a node import which name the same ones: an agent may import them once, and fork."""
    after: tuple[str, ...] = ()
    """Processes whose addresses must be known and live (where they have `health`) before this starts."""


class Node(Section):
    """A node's part in the run. Which of the allocated nodes plays it is decided when the job runs (`records.fleet`).

    Node 0 is the head; it is always played by the job's first node.
    """

    index: int
    group: int
    role: NodeRole | Literal["all"]
    """all: the processes of all roles share the node (`layout: one_node`)."""
    index_in_group: int
    processes: tuple[Process, ...] = ()


class HetGroup(Section):
    """One component of the batch job. The layouts `single` and `one_node` have exactly one."""

    index: int
    name: str
    nodes: int
    """Nodes that Slurm is asked for, spares included."""
    spares: int = 0
    """How many of them wait for another of the group to fail."""
    partition: str
    gres: str | None
    """For example gpu:8; None asks for none."""
    gpus_per_node: str | None = None
    """For example 8 or h200:8, in place of `gres`."""
    cpus_per_task: int
    mem: str | None = None
    """Per node."""
    mem_per_cpu: str | None = None
    """Per core, in place of `mem`."""
    constraint: str | None = None
    nodelist: str | None = None
    switches: str | None = None
    exclusive: bool = False

    @property
    def asked_gres(self) -> str | None:
        """GPUs per node that Slurm is asked for, as a generic resource: gpu:8."""
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
    avoid: tuple[str, ...] = ()
    """Nodes that failed lately, excluded as well."""
    dependency: str | None = None
    mail_user: str | None = None
    mail_types: tuple[str, ...] = ()
    licenses: str | None = None
    nice: int | None = None
    priority: int | None = None
    requeue: bool = True
    signal_s: int = 120
    extra: tuple[str, ...] = ()
    """Options of sbatch that are none of the above, on every component."""
    modules: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    """More options of the job's one srun."""
    launcher: tuple[str, ...] = ()
    """Words before the agent's own command: how a container is entered."""

    @property
    def excluded(self) -> str | None:
        """All nodes that the job must not get, as one host list."""
        return ",".join([*([self.exclude] if self.exclude else []), *self.avoid]) or None


class Totals(Section):
    """Derived sums, always printed."""

    nodes: int
    """Nodes that work; spares come on top."""
    spares: int = 0
    gpus: int
    trainer_gpus: int
    engines: int
    inference_nodes: int
    routers: int
    teacher_engines: int = 0
    environment_nodes: int = 0
    """0: environments run on the head node."""


class Finding(Section):
    """Something a check has to say about the Plan."""

    level: Level
    """error: refused. blocked: sound, but a real submit is refused here and now. warning, note: advice."""
    field: str
    text: str
    fix: str = ""
    value: str = ""
    """What the field has; empty where the text says it, or nothing is given."""

    def __str__(self) -> str:
        given = f" = {self.value}" if self.value else ""
        return f"{self.level}: {self.field}{given}: {self.text}" + (f" ({self.fix})" if self.fix else "")


class Plan(Section):
    """Recipe + Site, worked out. Same input, same bytes."""

    schema_: Literal[1] = Field(1, alias="schema")
    run: str
    run_dir: str
    task: Literal["rl", "sft", "serve", "eval"]
    layout: Literal["het", "single", "one_node"]
    executor: Literal["slurm", "local"]
    emulated: bool = False
    """Stand-ins run in place of engines, trainer ranks and environments: nothing needs the model's files."""
    device: Literal["cuda", "cpu"]
    python: str
    job: JobOptions
    groups: tuple[HetGroup, ...]
    nodes: tuple[Node, ...]
    replicas: tuple[Replica, ...]
    totals: Totals
    env: dict[str, str]
    """Environment of every process on every node."""
    library_path: tuple[str, ...] = ()
    """Directories put first on LD_LIBRARY_PATH of everything."""
    interface: str | None = None
    hcas: tuple[str, ...] = ()
    """HCAs to use, from the site file. Empty: what each node finds active."""
    addresses: dict[str, str] = {}
    """Node name to address, from the site file."""
    pass_env: tuple[str, ...] = ()
    """Variables that whoever submits must have set. Slurm and the agents hand them on; their values are in no file."""
    stall_timeout_s: int
    max_attempts: int
    node_silent_s: int = 90
    """A node that has not been heard of for this long is lost."""
    node_start_s: int = 300
    """Longest time between the first agent's start and another's, the head's included: nodes may first pull images."""
    bad_node_hours: int = 24
    """How long later jobs keep away from a node that failed."""
    findings: tuple[Finding, ...] = ()
    estimate: Estimate | None = None
    """None if the shape of the model is not known."""

    def to_json(self) -> str:
        """Canonical JSON: sorted by definition order, two-space indent, trailing newline."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"

    def processes(self) -> tuple[Process, ...]:
        """All processes, in node order."""
        return tuple(process for node in self.nodes for process in node.processes)

    @property
    def allocated(self) -> int:
        """Nodes of the job, spares included: one agent runs on each."""
        return sum(group.nodes for group in self.groups)

    @property
    def heartbeat_s(self) -> float:
        """Longest time between two signs of life of the head and of an agent that have no news."""
        return max(1.0, self.node_silent_s / 90)

    @property
    def survives_nodes(self) -> bool:
        """Whether the job goes on without a node, for the head to judge (`--no-kill`).

        Slurm counts a lost node against every component of a heterogeneous job, and cannot take it away from one that
        has a single node (left): it requeues that component alone, and the job falls apart. The head then requeues the
        whole job. Without --no-kill Slurm requeues the whole job at once.
        """
        return all(group.nodes > 1 for group in self.groups)

    def ranks(self, group: int) -> range:
        """Task ranks of the agents of one group: groups in order, one task a node."""
        first = sum(g.nodes for g in self.groups[:group])
        return range(first, first + self.groups[group].nodes)

    def group_of_rank(self, rank: int) -> HetGroup:
        """The group that an agent's node belongs to. Raises KeyError if the job has no such rank."""
        for group in self.groups:
            if rank in self.ranks(group.index):
                return group
        raise KeyError(rank)

    def process(self, name: str) -> Process:
        """One process by name. Raises KeyError."""
        for process in self.processes():
            if process.name == name:
                return process
        raise KeyError(name)
