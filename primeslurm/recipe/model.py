"""The recipe as a whole: sections, and the rules that span them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from primeslurm.recipe.base import Section
from primeslurm.recipe.inference import Deployment, Inference
from primeslurm.recipe.rollouts import Environment, Orchestrator
from primeslurm.recipe.scheduling import Monitor, Slurm
from primeslurm.recipe.training import Checkpoint, Model, Sft, Trainer, Weights

RunName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


class Recipe(Section):
    """A whole run. It names no host, partition or path of a site, so it runs on any cluster."""

    schema_: Literal[1] = Field(1, alias="schema")
    """Version of the recipe format."""
    name: RunName
    """Name of the run and of its directory."""
    task: Literal["rl", "sft"] = "rl"
    seed: int = 0
    max_steps: PositiveInt
    seq_len: PositiveInt
    """Longest trained sequence, and the length that batches are packed to."""
    model: Model
    trainer: Trainer = Trainer()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    environments: tuple[Environment, ...] = ()
    orchestrator: Orchestrator = Orchestrator()
    inference: Inference = Inference()
    sft: Sft | None = None
    deployment: Deployment = Deployment()
    slurm: Slurm = Slurm()
    monitor: Monitor = Monitor()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        problems: list[str] = []
        if self.task == "rl":
            if not self.environments:
                problems.append("environments: task rl needs at least one environment")
            if self.orchestrator.batch_size % self.orchestrator.group_size:
                problems.append(
                    f"orchestrator.batch_size = {self.orchestrator.batch_size}: must be a multiple of "
                    f"orchestrator.group_size = {self.orchestrator.group_size}"
                )
            inflight = self.orchestrator.max_inflight_rollouts
            if inflight is not None and inflight < self.orchestrator.group_size:
                problems.append(
                    f"orchestrator.max_inflight_rollouts = {inflight}: must be at least "
                    f"orchestrator.group_size = {self.orchestrator.group_size}"
                )
            labels = [e.label for e in self.environments]
            if len(set(labels)) != len(labels):
                problems.append(f"environments: names must be unique, got {', '.join(labels)}")
        if self.task == "sft" and self.sft is None:
            problems.append("sft: task sft needs an sft section")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def max_inflight(self) -> int:
        """Rollouts in flight at once."""
        return self.orchestrator.max_inflight_rollouts or 2 * self.orchestrator.batch_size

    @property
    def max_len(self) -> int:
        """Longest sequence an engine accepts, in tokens."""
        return self.model.max_len or self.seq_len
