"""The site file, which describes one cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import Directory, EnvironmentName, Module, Name, SearchPath, share_of
from primeslurm.recipe.sections.slurm import ComponentOptions, Submission


class NodeKind(ComponentOptions):
    """Nodes of one partition, and the Slurm options of every role that uses them."""

    partition: Name
    """Slurm partition of these nodes, for example `gpu`."""
    gpus: int = Field(0, ge=0, le=128)
    """GPUs per node. 0: a CPU partition."""
    cpus: PositiveInt
    """CPU cores per node that a job may use. A role that uses some of a node's GPUs gets the same fraction of its cores
    and memory."""
    gres: Name = "gpu"
    """Name of the generic resource in Slurm, for example `gpu` or `gpu:h200`."""
    request_gpus: Literal["gres", "gpus-per-node", "none"] = "gres"
    """Option with which the job asks for GPUs: `--gres`, `--gpus-per-node`, or none for clusters on which Slurm does
    not count GPUs. With `none` the job takes whole nodes, unless `exclusive` is false."""
    gpu: str | None = None
    """GPU type: a100, l40s, h100, h200, b200 or b300. Default: the type in `gres`. If it is unknown, `plan` gives no
    estimate."""
    memory_gib: PositiveFloat | None = None
    """Host memory of a node in GiB. Default: the value of `mem`."""
    disk_gib: PositiveFloat | None = None
    """Free space on each node's own disk in GiB, for local copies of checkpoints. Default: unknown."""
    scratch: SearchPath | None = None
    """Directory on each node's own disk for files that environments write during a rollout, for example `/scratch`.
    Default: the temporary directory."""

    def share(self, gpus: int) -> NodeKind:
        """Return a kind of node with `gpus` of the GPUs, and the same fraction of cores and memory."""
        # A job that asked for all memory with one GPU would wait for an empty node, and leave the other GPUs idle.
        if not 0 < gpus < self.gpus or self.request_gpus == "none":
            return self
        update = {
            "cpus": max(1, self.cpus * gpus // self.gpus),
            "mem": self.mem and share_of(self.mem, gpus, self.gpus),
            "memory_gib": self.memory_gib and self.memory_gib * gpus / self.gpus,
        }
        return self.model_copy(update=update)


class Network(Section):
    """Network between the nodes."""

    interface: str | None = None
    """Network interface whose address is used, for example `ib0`. Default: the address that the host name resolves
    to."""
    addresses: dict[str, str] = {}
    """Address of each node, for clusters whose node names do not resolve, for example `{gpu001: 10.0.0.1}`."""
    hcas: tuple[str, ...] = ()
    """Network adapters (HCAs) for NCCL, UCX and Mooncake, for example `[mlx5_0, mlx5_1]`. Default: the adapters of each
    node that have an active port, InfiniBand before Ethernet."""
    rdma: bool = True
    """true: nodes have InfiniBand or RoCE. false: only TCP."""
    gbps_per_gpu: PositiveFloat | None = None
    """Network bandwidth per GPU in Gbit/s, for estimates. Default: the usual value of the GPU type, 400 for H100, H200
    and B200."""
    storage_gbytes_per_s: PositiveFloat = 2.0
    """Bandwidth of the shared file system per node in GB/s, for estimates and start-up timeouts."""


class MeasuredRates(Section):
    """Rates of a partition's nodes while all of their GPUs work. `primeslurm calibrate` writes them."""

    at: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\dZ$")
    """Time of the measurement in UTC, for example `2026-11-30T13:05Z`."""
    device: Literal["cuda", "cpu"]
    """Device that was measured."""
    nodes: PositiveInt
    """Number of nodes that measured at the same time."""
    ranks_per_node: PositiveInt
    """Processes per node that measured at the same time, one per GPU."""
    products_tflops: float = Field(gt=0, le=1e5)
    """Matrix products of a GPU in bfloat16, or of a process on CPUs in float32 [TFLOPS]."""
    fp8_tflops: float | None = Field(None, gt=0, le=1e5)
    """Matrix products of a GPU in FP8 [TFLOPS]. Default: not measured."""
    memory_gbytes_per_s: float = Field(gt=0, le=1e6)
    """Bytes read and written by a copy in the device's memory [GB/s]."""
    host_gbytes_per_s: float | None = Field(None, gt=0, le=1e5)
    """Bytes that a GPU copies to pinned host memory, and as many from there at the same time [GB/s]. Default: not
    measured."""
    node_gbytes_per_s: float | None = Field(None, gt=0, le=1e5)
    """Bytes that a GPU sends to the others of its node by a collective [GB/s]. Default: not measured."""
    network_gbps_per_gpu: float | None = Field(None, gt=0, le=1e5)
    """The same between nodes, in Gbit/s per GPU. Default: not measured."""
    storage_write_gbytes_per_s: float = Field(gt=0, le=1e5)
    """Bytes that a node writes to the directory of runs, and flushes [GB/s]."""
    storage_read_gbytes_per_s: float = Field(gt=0, le=1e5)
    """Bytes that a node reads from there [GB/s]."""
    spread: dict[str, NonNegativeFloat] = {}
    """Largest minus smallest value of each rate, as a share of its median."""


class Site(Section):
    """A cluster, described once for all its users. `primeslurm init` and `primeslurm cluster up` write a site file."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of the site file format. Always 1."""
    name: str
    """Name of the cluster, shown in plans and reports."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cuda: nodes have NVIDIA GPUs. cpu: processes compute on CPUs, as on an embedded cluster with fake GPUs."""
    runs: Directory = "runs"
    """Directory of all runs, on a file system that every node shares, for example `/shared/me/runs`. A relative path is
    relative to the site file."""
    slurm_conf: str | None = None
    """Path of slurm.conf, for a Slurm that is not the system's default."""
    python: str | None = None
    """Python interpreter of the environment on the nodes, for example `/shared/primeslurm-env/bin/python`. Default:
    the interpreter that submits."""
    nodes: dict[str, NodeKind]
    """Kinds of nodes by role: control, train, inference, prefill, decode, teacher (default: those of inference) and
    environments (default: those of control). `default` is the kind for all other roles that are not named."""
    slurm: Submission = Submission()
    """Slurm options of every job, unless its recipe sets them."""
    modules: tuple[Module, ...] = ()
    """Environment modules that are loaded with `module load` before anything starts, for example `[cuda/13.0]`. If one
    does not load, the run ends and names it."""
    prologue: tuple[str, ...] = Field((), max_length=12)
    """Shell lines that the batch script runs before anything starts, for example `["source /etc/profile.d/proxy.sh"]`.
    If a line fails, the run ends and names it; add `|| true` to a line that may fail."""
    env: dict[EnvironmentName, str] = {}
    """Environment variables of every process, for example `{HF_HUB_OFFLINE: "1"}`."""
    pass_env: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that processes receive from the shell you submit from, for example
    `[WANDB_API_KEY]`. Their values are never written to a file."""
    library_path: tuple[SearchPath, ...] = ()
    """Directories put first on LD_LIBRARY_PATH, for example the `lib` of a UCX built for the cluster's network. A UCX
    in third_party/ucx of the checkout is found automatically."""
    network: Network = Network()
    """Network between the nodes."""
    measured: dict[Name, MeasuredRates] = {}
    """Measured rates by partition. Estimates use them in place of data sheets and of `network`. `primeslurm calibrate`
    writes this section."""
    prometheus: Literal["token", "open", "off"] = "token"
    """Access to `/metrics` of a run on its first node. token: with the bearer token in `prometheus.token` of the run
    directory. open: without a token, from every host that reaches the node. off: runs serve no metrics of their own.
    vLLM engines and routers always serve theirs without a token."""
    node_silent_s: PositiveInt = 90
    """Seconds without a heartbeat after which a node counts as lost. Network file systems may show old files for up to
    a minute."""
    node_start_s: PositiveInt = 300
    """Longest time in seconds between the start of the first and the last node agent. Raise it if nodes pull an image
    first."""
    bad_node_hours: PositiveInt = 24
    """Hours for which new jobs avoid a node that failed."""
    port_base: int = Field(20000, ge=1024, le=60000)
    """First port number that a plan uses."""

    def kind(self, role: str) -> NodeKind | None:
        return next((self.nodes[name] for name in self.kind_names(role) if name in self.nodes), None)

    @property
    def storage_gbytes_per_s(self) -> float:
        """Bandwidth of the shared file system per node [GB/s]: the lowest measured one, or that of `network`."""
        rates = self.measured.values()
        measured = [
            value for each in rates for value in (each.storage_write_gbytes_per_s, each.storage_read_gbytes_per_s)
        ]
        return min(measured, default=self.network.storage_gbytes_per_s)

    @staticmethod
    def kind_names(role: str) -> tuple[str, ...]:
        """Return the entries of `nodes` that may describe a role's nodes, in the order in which they are used."""
        fallbacks = {"teacher": ("inference",), "environments": ("control",)}
        return (role, *fallbacks.get(role, ()), "default")
