"""Compatibility rules, and the recipe, site and model that they look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from primeslurm.models.shape import ModelShape
from primeslurm.plan.commands.command import ENGINE_ROLES
from primeslurm.plan.commands.engine import settings_of
from primeslurm.plan.gpus import Gpu, gpu_of
from primeslurm.plan.placement.resources import ResourceRequest, expert_ranks
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.deployment import Disaggregated
from primeslurm.recipe.sections.inference import EngineSettings


@dataclass(frozen=True)
class RuleContext:
    """A recipe on a site, with the shape of its model."""

    recipe: Recipe
    site: Site
    requests: Sequence[ResourceRequest]  # empty if the recipe cannot be placed
    shape: ModelShape | None  # None if it is unknown

    @property
    def trains(self) -> bool:
        return self.recipe.task in ("rl", "sft") and self.recipe.tenant is None

    @property
    def serves(self) -> bool:
        return self.recipe.task != "sft" and self.recipe.tenant is None

    @property
    def disaggregated(self) -> bool:
        return isinstance(self.recipe.deployment.inference, Disaggregated)

    @property
    def dense(self) -> bool:
        """Return whether the model is known to have no experts."""
        return self.shape is not None and self.shape.experts is None

    @property
    def mamba(self) -> bool:
        """Return whether the model is known to have Mamba layers."""
        return self.shape is not None and self.shape.mamba is not None

    @property
    def deepep(self) -> bool:
        return self.recipe.trainer.parallelism.ep_backend == "deepep"

    @property
    def sparse(self) -> bool:
        """Return whether the model is known to have sparse attention."""
        return self.shape is not None and self.shape.indexer is not None

    @property
    def on_cpus(self) -> bool:
        return self.site.device == "cpu"

    def uses(self, option: str) -> bool:
        """Return whether the engines of a role use an option of theirs."""
        return any(getattr(settings, option) for _, settings in self.engines())

    @property
    def trainer_gpus(self) -> int:
        return sum(request.nodes * request.gpus for request in self.requests if request.role == "train")

    def engines(self) -> list[tuple[ResourceRequest, EngineSettings]]:
        return [
            (request, settings_of(self.recipe, ENGINE_ROLES[request.role]))
            for request in self.requests
            if request.role in ENGINE_ROLES
        ]

    def expert_groups(self) -> list[tuple[ResourceRequest, EngineSettings, int]]:
        return [(request, settings, expert_ranks(self.recipe, request)) for request, settings in self.engines()]

    def gpus(self) -> list[Gpu]:
        """Return the known GPU types that run engines or the trainer."""
        if self.site.device != "cuda":
            return []
        return [gpu for request in self.requests if request.gpus and (gpu := gpu_of(request.kind))]

    def older_gpu(self, sm: int) -> str:
        """Return which GPU has a lower compute capability than `sm`, for a finding; empty if none has."""
        return next((f"{gpu.name} is SM{gpu.sm}" for gpu in self.gpus() if gpu.sm < sm), "")

    def no_experts(self, used: bool) -> str:
        """Return the finding that the model has no experts, if a feature that needs them is used."""
        return when(used and self.dense, "the model has no experts")

    def uneven_experts(self, ranks: int) -> str:
        """Return the finding that `ranks` GPUs do not divide the experts; empty if they do."""
        experts = self.shape.experts.count if self.shape and self.shape.experts else 0
        return f"{experts} experts cannot be spread evenly over {ranks} GPUs" if experts % ranks else ""


def when(applies: object, finding: str) -> str:
    """Return the finding if it applies, for `Rule.finds`."""
    return finding if applies else ""


@dataclass(frozen=True)
class Rule:
    """A combination of settings that does not work, or does not work well."""

    name: str
    level: Literal["error", "warning"]
    field: str
    rule: str  # the rule in words, for findings and for the table in the docs
    finds: Callable[[RuleContext], str]  # Describes how the recipe breaks the rule. Empty: it does not.
    fix: str
    source: str  # source of the fact

    def value(self, recipe: Recipe) -> str:
        """Return the recipe's value of the field; empty if it is not set or not a single value."""
        value: object = recipe
        for name in self.field.split("."):
            value = getattr(value, name, None)
        if isinstance(value, bool):
            return str(value).lower()
        return str(value) if isinstance(value, str | int | float) else ""
