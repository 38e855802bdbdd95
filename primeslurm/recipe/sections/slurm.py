"""What Slurm is asked for, and what is watched."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.slurm_syntax import (
    Constraint,
    Dependency,
    Hosts,
    Licenses,
    MailType,
    MailUser,
    Memory,
    Mount,
    Name,
    Names,
    Option,
    SlurmTime,
    Switches,
)

DEFAULT_TIME = "24:00:00"


class ComponentOptions(Section):
    """Options that Slurm has per component of a job; anything unset comes from the role's nodes in the site file."""

    constraint: Constraint | None = None
    """Features that a node must have."""
    nodelist: Hosts | None = None
    """Nodes that must be among those allocated."""
    mem: Memory | None = None
    """Memory per node, for example 2000G. Default: the partition's own."""
    mem_per_gpu: Memory | None = None
    """Memory per allocated GPU, instead of `mem`."""
    mem_per_cpu: Memory | None = None
    """Memory per core, instead of `mem`, for clusters that take `--mem-per-cpu` only."""
    switches: Switches | None = None
    """Most leaf switches that the nodes may lie under, and how long to wait for that: "1@02:00:00"."""
    exclusive: bool | None = None
    """Share no node with other jobs."""


class Component(ComponentOptions):
    """Slurm options of one role's component."""

    partition: Name | None = None
    cpus_per_task: PositiveInt | None = None
    """CPU cores per node."""


class Mail(Section):
    """When Slurm writes mail, and to whom."""

    types: tuple[MailType, ...] = ("FAIL", "REQUEUE", "END")
    user: MailUser | None = None
    """Default: the submitting user."""


class Pyxis(Section):
    """Agents run in a container that Slurm's pyxis plugin starts."""

    type: Literal["pyxis"] = "pyxis"
    image: str
    """Squash file, or REGISTRY#IMAGE:TAG."""
    mounts: tuple[Mount, ...] = ()
    """/source, /source:/target or /source:/target:flags. The run directory is always mounted."""
    workdir: str | None = None
    writable: bool = False
    mount_home: bool = False


class Apptainer(Section):
    """Agents run under `apptainer exec`."""

    type: Literal["apptainer"] = "apptainer"
    image: str
    """SIF file, sandbox directory, or URI."""
    mounts: tuple[Mount, ...] = ()
    """/source, /source:/target or /source:/target:ro. The run directory is always mounted."""
    options: tuple[str, ...] = ()
    """Other options of `apptainer exec`, a word each, for example --writable-tmpfs."""


Container = Annotated[Pyxis | Apptainer, Field(discriminator="type")]


class Submission(Section):
    """Options of the job as a whole. The site file gives defaults for all of them under `slurm`."""

    time: SlurmTime | None = None
    """Time limit, HH:MM:SS or D-HH:MM:SS in quotes. Default: 24:00:00."""
    time_min: SlurmTime | None = None
    """Slurm may lower the time limit to this, to start the job earlier."""
    account: Name | None = None
    qos: Name | None = None
    reservation: Names | None = None
    comment: str | None = None
    exclude: Hosts | None = None
    """Nodes that must not be used."""
    dependency: Dependency | None = None
    """For example afterok:123, or singleton: after all earlier jobs of this name."""
    mail: Mail | None = None
    licenses: Licenses | None = None
    nice: int | None = Field(None, ge=-2147483645, le=2147483645)
    """Added to the job's niceness: higher runs later."""
    priority: PositiveInt | None = None
    """Fixed priority, for operators of the cluster."""
    extra: tuple[Option, ...] = ()
    """Other options of sbatch, one each: [--wckey=x]. What the plan sets itself is refused."""
    container: Container | None = None
    """Run in a container. Default: on the nodes themselves."""

    def over(self, defaults: Submission) -> Submission:
        """These options, and the defaults for what is not said here."""
        said = {name: value for name in Submission.model_fields if (value := getattr(self, name)) not in (None, ())}
        return defaults.model_copy(update=said)


class Slurm(Submission):
    """Options of the batch job."""

    requeue: bool = True
    """Requeue and resume after preemption, the time limit, or a failed trainer."""
    max_attempts: PositiveInt = 10
    """Attempts of one run, without those that Slurm ended after they committed a step. Three failed attempts in a row
    without a new committed step end it earlier."""
    checkpoint_signal_s: int = Field(120, ge=0, le=65535)
    """USR2 arrives this many seconds before the time limit: time to checkpoint and requeue."""
    control: Component = Component()
    train: Component = Component()
    inference: Component = Component()
    prefill: Component = Component()
    decode: Component = Component()
    teacher: Component = Component()
    environments: Component = Component()


class Wandb(Section):
    """Weights & Biases logging, in a run that has this run's name and id: all attempts go on in it."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"


class Monitor(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    wandb: Wandb | None = None


class MetricsOptions(TypedDict):
    """Keyword arguments of `records.metrics.MetricsLog`: where metrics go besides metrics.jsonl."""

    tensorboard: bool
    wandb: dict[str, Any] | None
    """What `wandb.init` is told of the run; None for no Weights & Biases."""
