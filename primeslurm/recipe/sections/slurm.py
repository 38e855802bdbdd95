"""Slurm options of a job and its roles, and containers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from primeslurm.recipe.fields.section import Section
from primeslurm.recipe.fields.types import (
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
# Least value of `checkpoint_signal_s` that the planner derives [s]
CHECKPOINT_SIGNAL_S = 120


class ComponentOptions(Section):
    """Options that Slurm has for each component of a job. Unset options come from the role's nodes in the site file."""

    constraint: Constraint | None = None
    """Features that a node must have, for example `h200&nvlink`."""
    nodelist: Hosts | None = None
    """Nodes that must be part of the allocation, for example `gpu[001-004]`."""
    mem: Memory | None = None
    """Memory per node, for example `2000G`. Default: the default of the partition."""
    mem_per_gpu: Memory | None = None
    """Memory per allocated GPU, for example `200G`, instead of `mem`."""
    mem_per_cpu: Memory | None = None
    """Memory per core, for example `8G`, instead of `mem`. For clusters that accept `--mem-per-cpu` only."""
    switches: Switches | None = None
    """Largest number of leaf switches for the nodes, and how long to wait for that, for example `"1@02:00:00"`."""
    exclusive: bool | None = None
    """Do not share nodes with other jobs. Default: the partition decides."""


class Component(ComponentOptions):
    """Slurm options for the nodes of one role."""

    partition: Name | None = None
    """Partition of this role, for example `gpu`. Default: the partition in the site file."""
    cpus_per_task: PositiveInt | None = None
    """CPU cores per node. Default: the cores in the site file."""


class Mail(Section):
    """When Slurm sends mail, and to whom."""

    types: tuple[MailType, ...] = ("FAIL", "REQUEUE", "END")
    """Events for which Slurm sends mail, with the names of `sbatch --mail-type`."""
    user: MailUser | None = None
    """Mail address or user name. Default: the user who submits."""


class Pyxis(Section):
    """Run all processes in a container that Slurm's pyxis plugin starts."""

    type: Literal["pyxis"] = "pyxis"
    image: str
    """Squash file, or REGISTRY#IMAGE:TAG, for example `nvcr.io#nvidia/pytorch:25.10-py3`."""
    mounts: tuple[Mount, ...] = ()
    """Directories to mount: `/source`, `/source:/target` or `/source:/target:flags`. The run directory is always
    mounted."""
    workdir: str | None = None
    """Working directory inside the container. Default: the image's own."""
    writable: bool = False
    """Allow writes to the container's root file system."""
    mount_home: bool = False
    """Mount your home directory into the container."""


class Apptainer(Section):
    """Run all processes under `apptainer exec`."""

    type: Literal["apptainer"] = "apptainer"
    image: str
    """SIF file, sandbox directory, or URI such as `docker://ubuntu:24.04`."""
    mounts: tuple[Mount, ...] = ()
    """Directories to mount: `/source`, `/source:/target` or `/source:/target:ro`. The run directory is always
    mounted."""
    options: tuple[str, ...] = ()
    """Further options of `apptainer exec`, one word per entry, for example `[--writable-tmpfs]`."""


Container = Annotated[Pyxis | Apptainer, Field(discriminator="type")]


class Submission(Section):
    """Slurm options of the job as a whole. The site file sets defaults for them under `slurm`."""

    time: SlurmTime | None = None
    """Time limit as HH:MM:SS or D-HH:MM:SS, in quotes, for example `"2-00:00:00"`. Default: 24:00:00."""
    time_min: SlurmTime | None = None
    """Shortest acceptable time limit, for example `"04:00:00"`. Slurm may shorten the limit to this to start the job
    earlier."""
    account: Name | None = None
    """Slurm account that is charged, for example `my-project`. Default: your default account."""
    qos: Name | None = None
    """Slurm quality of service, for example `high`. Default: the default of the account or partition."""
    reservation: Names | None = None
    """Slurm reservation that the job runs in, for example `maintenance-test`. Default: none."""
    comment: str | None = None
    """Comment of the job, shown by `squeue` and `sacct`."""
    exclude: Hosts | None = None
    """Nodes that the job must not use, for example `gpu[007,012]`."""
    dependency: Dependency | None = None
    """When the job may start, for example `afterok:123`, or `singleton` (after all earlier jobs of the same name)."""
    mail: Mail | None = None
    """When Slurm sends mail about the job. Default: never."""
    licenses: Licenses | None = None
    """Licenses that the job needs, for example `matlab:2`."""
    nice: int | None = Field(None, ge=-2147483645, le=2147483645)
    """Adjustment of the job's priority. A higher value starts later."""
    priority: PositiveInt | None = None
    """Fixed priority of the job. Only operators of the cluster may set it."""
    extra: tuple[Option, ...] = ()
    """Further sbatch options, one per entry, for example `[--wckey=x]`. Options that the plan sets are refused."""
    container: Container | None = None
    """Container that all processes run in. Default: no container."""

    def over(self, defaults: Submission) -> Submission:
        """Return these options, with `defaults` for options that are not set."""
        # An empty list also counts as not set.
        options = {name: value for name in Submission.model_fields if (value := getattr(self, name)) not in (None, ())}
        return defaults.model_copy(update=options)


class Slurm(Submission):
    """Slurm options of the job, and options per role."""

    requeue: bool = True
    """Requeue the job and resume after preemption, the time limit, or a failed trainer."""
    max_attempts: PositiveInt = 10
    """Largest number of attempts of a run. Attempts that Slurm ended after they committed a step do not count. Three
    failed attempts in a row without a new committed step end the run earlier."""
    checkpoint_signal_s: int | None = Field(None, ge=0, le=65535)
    """Seconds before the time limit at which Slurm signals the job, so that it writes a checkpoint and requeues.
    Default: 1.5 times the estimate of writing a checkpoint, at least 2 minutes and at most half of the time."""
    control: Component = Component()
    """Options for the node of head and orchestrator."""
    train: Component = Component()
    """Options for the trainer's nodes."""
    inference: Component = Component()
    """Options for nodes whose engines both prefill and decode."""
    prefill: Component = Component()
    """Options for nodes of prefill engines."""
    decode: Component = Component()
    """Options for nodes of decode engines."""
    teacher: Component = Component()
    """Options for nodes of the teacher's engines."""
    environments: Component = Component()
    """Options for nodes of environment workers."""

    @property
    def signal_s(self) -> int:
        """Seconds before the time limit at which Slurm signals the job."""
        return CHECKPOINT_SIGNAL_S if self.checkpoint_signal_s is None else self.checkpoint_signal_s
