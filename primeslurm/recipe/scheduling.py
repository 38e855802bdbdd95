"""What Slurm is asked for, and what is watched."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, NonNegativeInt, PositiveInt

from primeslurm.recipe.base import Section

_TIME = re.compile(r"^(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})$")


def _time(value: str) -> str:
    if not _TIME.match(value):
        raise ValueError("must be HH:MM:SS or D-HH:MM:SS, in quotes")
    return value


SlurmTime = Annotated[str, AfterValidator(_time)]


def minutes(value: str) -> int:
    """A Slurm time as whole minutes, rounded up."""
    match = _TIME.match(value)
    if match is None:
        raise ValueError(f"not a Slurm time: {value}")
    days, hours, mins, secs = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + mins + (1 if secs else 0)


class Component(Section):
    """Slurm options of one role's component; anything unset comes from the site file."""

    partition: str | None = None
    constraint: str | None = None
    mem: str | None = None
    cpus_per_task: PositiveInt | None = None


class Slurm(Section):
    """Options of the batch job."""

    time: SlurmTime = "24:00:00"
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    comment: str | None = None
    exclude: str | None = None
    requeue: bool = True
    """Requeue and resume after preemption, the time limit, or a failed trainer."""
    max_attempts: PositiveInt = 10
    """Attempts of one run. Three failed attempts in a row without a new committed step end it earlier."""
    checkpoint_signal_s: NonNegativeInt = 120
    """USR2 arrives this many seconds before the time limit: time to checkpoint and requeue."""
    control: Component = Component()
    train: Component = Component()
    inference: Component = Component()
    prefill: Component = Component()
    decode: Component = Component()


class Wandb(Section):
    """Weights & Biases logging."""

    project: str
    entity: str | None = None
    mode: str = "online"


class Monitor(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    wandb: Wandb | None = None
