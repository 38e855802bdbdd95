"""Facts of one cluster: what never belongs in a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import Directory, EnvironmentName, Module, Name, SearchPath, share_of
from primeslurm.recipe.sections.slurm import ComponentOptions, Submission


class NodeKind(ComponentOptions):
    """Nodes of one partition, and the Slurm options of every component that gets them."""

    partition: Name
    gpus: int = Field(0, ge=0, le=128)
    """GPUs per node; 0 for CPU partitions."""
    cpus: PositiveInt
    """CPU cores per node that a job may use. As of `mem`, a role that uses some of a node's GPUs asks for its share."""
    gres: Name = "gpu"
    """Name of the generic resource, for example gpu or gpu:h200."""
    request_gpus: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How a job asks for GPUs: with `--gres` or `--gpus-per-node`, or not at all, where Slurm does not count GPUs. Then
    a job gets whole nodes, unless `exclusive` is false."""
    gpu: str | None = None
    """Type of the GPUs: a100, l40s, h100, h200, b200, b300. Default: the type in `gres`; unknown: no estimate."""
    memory_gib: PositiveFloat | None = None
    """Host memory of a node. Default: what `mem` asks for."""
    disk_gib: PositiveFloat | None = None
    """Space on each node's own disk for what a run keeps there: copies of checkpoints. Default: unknown."""
    scratch: SearchPath | None = None
    """Directory on each node's own disk for what environments write while they run: working directories of rollouts,
    sandboxes. Default: the temporary directory."""

    def share(self, gpus: int) -> NodeKind:
        """Give the part of a node that goes with some of its GPUs: as large a part of its cores and memory.

        A job that takes all memory of a node with one of its GPUs waits for an empty node, and leaves the others idle.
        """
        if not 0 < gpus < self.gpus or self.request_gpus == "none":
            return self
        update = {
            "cpus": max(1, self.cpus * gpus // self.gpus),
            "mem": self.mem and share_of(self.mem, gpus, self.gpus),
            "memory_gib": self.memory_gib and self.memory_gib * gpus / self.gpus,
        }
        return self.model_copy(update=update)


class Network(Section):
    """How nodes of the site reach one another."""

    interface: str | None = None
    """Interface whose address is used, for example ib0. Default: the address the host name resolves to."""
    addresses: dict[str, str] = {}
    """Node name to address, for clusters whose node names do not resolve."""
    hcas: tuple[str, ...] = ()
    """HCAs for NCCL, UCX and Mooncake, for example [mlx5_0, mlx5_1]. Default: on each node those with an active port,
    InfiniBand before Ethernet."""
    rdma: bool = True
    """Nodes reach one another's memory over InfiniBand or RoCE."""
    gbps_per_gpu: PositiveFloat | None = None
    """Network bandwidth per GPU in Gbit/s. Default: usual for the GPU type, 400 for H100, H200 and B200."""
    storage_gbytes_per_s: PositiveFloat = 2.0
    """What one process writes to the shared file system in GB/s, for estimates."""


class Site(Section):
    """A cluster. Written once by whoever knows it; `primeslurm cluster up` writes one for its own cluster."""

    schema_: Literal[1] = Field(1, alias="schema")
    name: str
    device: Literal["cuda", "cpu"] = "cuda"
    """What the GPUs of this site are. An emulated cluster has fake GPUs and computes on its CPUs."""
    runs: Directory = "runs"
    """Directory of all runs, on a file system that every node shares."""
    slurm_conf: str | None = None
    """SLURM_CONF to use, where it is not the system's own."""
    python: str | None = None
    """Python of the environment on the nodes. Default: the one that submits."""
    nodes: dict[str, NodeKind]
    """Kinds of node by role: control, train, inference, prefill, decode, teacher (default: inference), environments
    (default: control); `default` serves roles not named."""
    slurm: Submission = Submission()
    """Options of every job, unless its recipe says otherwise."""
    modules: tuple[Module, ...] = ()
    """Loaded with `module load` before anything starts. If one does not load, the run ends and names it."""
    prologue: tuple[str, ...] = Field((), max_length=12)
    """Shell lines run in the batch script before anything starts, as they are. For more, `source` a file. If a command
    fails, the run ends and names it; add `|| true` to one that may fail."""
    env: dict[EnvironmentName, str] = {}
    """Environment variables of every process."""
    pass_env: tuple[EnvironmentName, ...] = ()
    """Variables of whoever submits that processes need, for example WANDB_API_KEY: their values are written nowhere."""
    library_path: tuple[SearchPath, ...] = ()
    """Directories put first on LD_LIBRARY_PATH, for example the `lib` of a UCX built for the cluster's fabric.

    A UCX in third_party/ucx of the checkout is found by itself.
    """
    network: Network = Network()
    node_silent_s: PositiveInt = 90
    """A node that has not been heard of for this long is lost. Network file systems may show old files for a minute."""
    node_start_s: PositiveInt = 300
    """Longest time between the first agent's start and another's: a node may first have to pull an image."""
    bad_node_hours: PositiveInt = 24
    """How long new jobs keep away from a node that failed."""
    port_base: int = Field(20000, ge=1024, le=60000)
    """First port that a plan may prefer."""

    def kind(self, role: str) -> NodeKind | None:
        """Find the kind of node that serves a role; None if the site has none."""
        like = {"teacher": ("inference",), "environments": ("control",)}
        names = (role, *like.get(role, ()), "default")
        return next((self.nodes[name] for name in names if name in self.nodes), None)
