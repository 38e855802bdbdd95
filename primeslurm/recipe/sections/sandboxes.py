"""What programs of a rollout run in: the harness that drives the model, the runtime around it, and its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import EnvironmentName, Json

SUBPROCESS_MEMORY_GB = 4.0
SUBPROCESS_DISK_GB = 1.0
"""What a sandbox of the node gets where the recipe sets no limit. Its files are in memory, too."""

STAGES = ("setup", "rollout", "finalize", "scoring")
"""Of a rollout with programs. Each may take `limits.wall_time_s`."""


class Harness(Section):
    """The program that talks to the model. Fields beside `id` are options of this harness, as verifiers names them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Json]

    id: str = Field(min_length=1)
    """bash, "null" (in quotes), mini_swe_agent, terminus_2, claude_code ..., or a package that exports a harness."""

    @field_validator("id", mode="before")
    @classmethod
    def _null_in_quotes(cls, value: Any) -> Any:
        if value is None:
            why = 'YAML reads null without quotes as nothing: write `id: "null"` for the harness of that name'
            raise PydanticCustomError("null_harness", "{why}", {"why": why})
        return value

    @property
    def options(self) -> dict[str, Json]:
        """What verifiers validates: the id and the harness's own options."""
        return {"id": self.id, **(self.__pydantic_extra__ or {})}


class Limits(Section):
    """What one rollout's programs may use, all together."""

    cpus: PositiveFloat | None = None
    """CPU cores. Default: as many as are free; at providers 1, at E2B 2."""
    memory_gb: PositiveFloat | None = None
    """Memory. Default: 4 with `subprocess`; without a limit in containers; at providers 2, at E2B 1."""
    disk_gb: PositiveFloat | None = None
    """Files that it writes: with `subprocess`, which keeps them in memory, `apptainer`, where nodes have fuse2fs, and
    `prime`. Default: 1; without a limit in containers; at `prime` 5."""
    processes: PositiveInt | None = None
    """Processes and threads at once; only `subprocess` has this limit. Default: 256."""
    wall_time_s: PositiveFloat = 3600
    """Longest set-up, longest run of the agent, longest scoring: each of these alone."""
    network: Literal["none", "open"] | tuple[str, ...] | None = None
    """none: the model and the rollout's own tools, nothing else. open: whatever the node reaches. A list: these hosts
    (docker, podman and hosted runtimes). Default: none with `subprocess`, else open. apptainer has none from the start
    of its container: with `install: false`."""

    @property
    def longest_s(self) -> float:
        """Longest time of a rollout, with all its stages."""
        return len(STAGES) * self.wall_time_s


class SubprocessRuntime(Section):
    """Programs of the node itself, each rollout in a sandbox of its own (bubblewrap)."""

    type: Literal["subprocess"] = "subprocess"
    limits: Limits = Limits()
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of variables that the agent's program gets, with their values from where you submit; written nowhere."""
    visible: tuple[Annotated[str, Field(pattern=r"^/[^:,]*$")], ...] = ()
    """Further directories of the node that programs may read, such as tools or data."""
    trusted: bool = False
    """Without a sandbox: programs may read and do what the job's user may. Only for tasks that you trust."""


class ContainerRuntime(Section):
    """What containers have in common, on the node or at a provider."""

    image: str | None = None
    """For tasks that name none: a reference on a registry, or with apptainer also the path of a SIF file.
    Default: python:3.11-slim."""
    workdir: str | None = None
    """Default: the task's, or /app."""
    limits: Limits = Limits()
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of variables that the agent's program gets, with their values from where you submit; written nowhere but,
    with apptainer, to a file of yours while the container is there."""


class NodeContainerRuntime(ContainerRuntime):
    """What containers on the node have in common."""

    install: bool = True
    """Each rollout installs its harness into its container, from PyPI or whence it comes. false: a harness that is a
    Python script runs with the node's own Python and packages, which the container sees read-only, and nothing is
    downloaded. The image needs the C libraries of the node's Python: of a standalone one, only glibc."""


def sees_packages(runtime: Runtime | None) -> bool:
    """Tell whether containers see the node's packages, and harnesses run with them."""
    return isinstance(runtime, NodeContainerRuntime) and not runtime.install


class ApptainerRuntime(NodeContainerRuntime):
    """A container on the node, without a daemon or rights: what Slurm clusters have."""

    type: Literal["apptainer"] = "apptainer"


def closes_network(runtime: Runtime | None) -> bool:
    """Tell whether containers are on networks of their own, which our sandboxes give and not their engine."""
    return isinstance(runtime, ApptainerRuntime) and runtime.limits.network == "none"


class DockerRuntime(NodeContainerRuntime):
    """A container of the node's docker."""

    type: Literal["docker"] = "docker"


class PodmanRuntime(NodeContainerRuntime):
    """A container of the node's podman."""

    type: Literal["podman"] = "podman"


Gpu = Annotated[str, Field(pattern=r"^[A-Za-z][^:\s]*(:[1-9][0-9]*)?$")]
"""A kind of GPU, and how many if there are several: A100, A100:2."""


class PrimeRuntime(ContainerRuntime):
    """A sandbox at Prime Intellect. Its key is one of `pass_env`; nodes must reach the internet."""

    type: Literal["prime"] = "prime"
    region: str | None = None
    """Where sandboxes are. Default: the provider chooses."""
    gpu: Gpu | None = None
    """GPUs of a sandbox: A100, A100:2."""
    checkpoint: str | None = None
    """A durable checkpoint of a sandbox, to start from instead of `image`; it keeps its own disk."""
    labels: tuple[str, ...] = ()
    """Labels of sandboxes, beside the run's id."""
    idle_timeout: PositiveFloat | None = 3600
    """Seconds without a request after which a sandbox ends. null: never."""
    creates_per_min: PositiveInt | None = None
    """Sandboxes that all workers of a node begin in a minute. Default: as many as are asked for."""


class ModalRuntime(ContainerRuntime):
    """A sandbox at Modal. Its key is one of `pass_env`; nodes must reach the internet."""

    type: Literal["modal"] = "modal"
    region: str | None = None
    """Where sandboxes are. Default: the provider chooses."""
    gpu: Gpu | None = None
    """GPUs of a sandbox: A100, A100:2."""
    vm: bool = False
    """A virtual machine, as programs need that start containers of their own."""
    creates_per_sec: PositiveFloat | None = 40
    """Sandboxes that all workers of a node begin in a second. null: as many as are asked for."""


class E2BRuntime(ContainerRuntime):
    """A sandbox at E2B, whose plan must let it live a day. Its key is one of `pass_env`; nodes reach the internet."""

    type: Literal["e2b"] = "e2b"
    creates_per_sec: PositiveFloat | None = 1
    """Sandboxes that all workers of a node begin in a second. null: as many as are asked for."""


HostedRuntime = PrimeRuntime | ModalRuntime | E2BRuntime
"""Runtimes at providers."""

Runtime = Annotated[
    SubprocessRuntime | ApptainerRuntime | DockerRuntime | PodmanRuntime | PrimeRuntime | ModalRuntime | E2BRuntime,
    Field(discriminator="type"),
]
