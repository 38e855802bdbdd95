"""Harness, runtime and limits of the programs that a rollout runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import EnvironmentName, Json

# Default limits of a sandbox on the node. Its files are held in memory as well.
SUBPROCESS_MEMORY_GB = 4.0
SUBPROCESS_DISK_GB = 1.0

# Stages of a rollout with programs. Each may take `limits.wall_time_s`.
STAGES = ("setup", "rollout", "finalize", "scoring")


class Harness(Section):
    """The program that talks to the model.

    Fields other than `id` are options of this harness, with the names that verifiers gives them.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Json]

    id: str = Field(min_length=1)
    """Name of the harness: bash, "null" (in quotes), mini_swe_agent, terminus_2, claude_code and others, or a package
    that exports a harness."""

    @field_validator("id", mode="before")
    @classmethod
    def _null_in_quotes(cls, value: Any) -> Any:
        if value is None:
            why = 'YAML reads null without quotes as no value: write `id: "null"` for the harness of that name'
            raise PydanticCustomError("null_harness", "{why}", {"why": why})
        return value

    @property
    def options(self) -> dict[str, Json]:
        """The id and the harness's own options, which verifiers validates."""
        return {"id": self.id, **(self.__pydantic_extra__ or {})}


class Limits(Section):
    """Limits on everything that one rollout's programs use together."""

    cpus: PositiveFloat | None = None
    """CPU cores. Default: no limit on the node; 1 at hosted providers, 2 at E2B."""
    memory_gb: PositiveFloat | None = None
    """Memory in GB. Default: 4 with `subprocess`, no limit in containers, 2 at hosted providers, 1 at E2B."""
    disk_gb: PositiveFloat | None = None
    """Size in GB of the files that programs write. Default: 1 with `subprocess` (held in memory), no limit in
    containers, 5 at Prime Intellect. With `apptainer` a limit needs fuse2fs on the nodes."""
    processes: PositiveInt | None = None
    """Largest number of processes and threads. Only `subprocess` has this limit. Default: 256."""
    wall_time_s: PositiveFloat = 3600
    """Seconds that set-up, the agent's run, its end and the scoring may take. The limit applies to each of these
    separately."""
    network: Literal["none", "open"] | tuple[str, ...] | None = None
    """none: only the model and the rollout's own tools. open: everything that the node reaches. A list of hosts: only
    these, for example `[pypi.org]` (docker, podman and hosted runtimes). Default: none with `subprocess`, else open.
    With apptainer, `none` needs `install: false`."""

    @property
    def longest_s(self) -> float:
        """Longest time of all stages of a rollout together [s]."""
        return len(STAGES) * self.wall_time_s


class SubprocessRuntime(Section):
    """Programs of the node, in a bubblewrap sandbox for each rollout."""

    type: Literal["subprocess"] = "subprocess"
    limits: Limits = Limits()
    """Limits on time, memory, disk, processes and network."""
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that the agent's program receives from the shell you submit from, for example
    `[GITHUB_TOKEN]`. Their values are never written to a file."""
    visible: tuple[Annotated[str, Field(pattern=r"^/[^:,]*$")], ...] = ()
    """Further directories of the node that programs may read, such as tools or data."""
    trusted: bool = False
    """Use no sandbox: programs have all rights of the job's user. Only for tasks that you trust."""


class ContainerRuntime(Section):
    """Options that all container runtimes share."""

    image: str | None = None
    """Image for tasks that name none: a reference to a registry, or with apptainer also the path of a SIF file.
    Default: python:3.11-slim."""
    workdir: str | None = None
    """Working directory in the container. Default: that of the task, or /app."""
    limits: Limits = Limits()
    """Limits on time, memory, disk, processes and network."""
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that the agent's program receives from the shell you submit from. Their values are
    never written to a file, except with apptainer: to a private file while the container runs."""


class NodeContainerRuntime(ContainerRuntime):
    """Options of all containers on the node."""

    install: bool = True
    """true: each rollout downloads and installs its harness in its container. false: a harness that is a Python script
    runs with the node's Python and packages, which are mounted read-only, and downloads nothing. The image needs the C
    libraries of that Python; a standalone Python needs only glibc."""


def sees_packages(runtime: Runtime | None) -> bool:
    """Return whether harnesses in containers run with the packages of the node."""
    return isinstance(runtime, NodeContainerRuntime) and not runtime.install


class ApptainerRuntime(NodeContainerRuntime):
    """An Apptainer container on the node, without a daemon or special rights. Usual on Slurm clusters."""

    type: Literal["apptainer"] = "apptainer"


def closes_network(runtime: Runtime | None) -> bool:
    """Return whether primeslurm puts the containers into their own network, because apptainer cannot."""
    return isinstance(runtime, ApptainerRuntime) and runtime.limits.network == "none"


class DockerRuntime(NodeContainerRuntime):
    """A container of the node's Docker."""

    type: Literal["docker"] = "docker"


class PodmanRuntime(NodeContainerRuntime):
    """A container of the node's Podman."""

    type: Literal["podman"] = "podman"


# GPU type, and the number of GPUs if there are several: A100, A100:2.
Gpu = Annotated[str, Field(pattern=r"^[A-Za-z][^:\s]*(:[1-9][0-9]*)?$")]


class PrimeRuntime(ContainerRuntime):
    """A sandbox at Prime Intellect. List its key in `pass_env`. Nodes must reach the internet."""

    type: Literal["prime"] = "prime"
    region: str | None = None
    """Region of the sandboxes. Default: the provider chooses."""
    gpu: Gpu | None = None
    """GPU type and count of a sandbox, for example `A100` or `A100:2`. Default: no GPU."""
    checkpoint: str | None = None
    """Durable checkpoint of a sandbox to start from instead of `image`. It brings its own disk."""
    labels: tuple[str, ...] = ()
    """Labels of the sandboxes, in addition to the run's id."""
    idle_timeout: PositiveFloat | None = 3600
    """Seconds without a request after which a sandbox ends. null: never."""
    creates_per_min: PositiveInt | None = None
    """Sandboxes that all workers of a node may create per minute. Default: no limit."""


class ModalRuntime(ContainerRuntime):
    """A sandbox at Modal. List its keys in `pass_env`. Nodes must reach the internet."""

    type: Literal["modal"] = "modal"
    region: str | None = None
    """Region of the sandboxes. Default: the provider chooses."""
    gpu: Gpu | None = None
    """GPU type and count of a sandbox, for example `A100` or `A100:2`. Default: no GPU."""
    vm: bool = False
    """Use a virtual machine, for programs that start containers themselves."""
    creates_per_sec: PositiveFloat | None = 40
    """Sandboxes that all workers of a node may create per second. null: no limit."""


class E2BRuntime(ContainerRuntime):
    """A sandbox at E2B.

    Your plan must allow sandboxes that live 24 hours. List its key in `pass_env`. Nodes must reach the internet.
    """

    type: Literal["e2b"] = "e2b"
    creates_per_sec: PositiveFloat | None = 1
    """Sandboxes that all workers of a node may create per second. null: no limit."""


# Runtimes of hosted providers.
HostedRuntime = PrimeRuntime | ModalRuntime | E2BRuntime

Runtime = Annotated[
    SubprocessRuntime | ApptainerRuntime | DockerRuntime | PodmanRuntime | PrimeRuntime | ModalRuntime | E2BRuntime,
    Field(discriminator="type"),
]
