"""What a compatibility rule looks at, and what a rule is."""

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
    """One recipe on one site."""

    recipe: Recipe
    site: Site
    requests: Sequence[ResourceRequest]
    """Empty if the recipe cannot be placed."""
    shape: ModelShape | None
    """None if nothing is known about the model."""

    @property
    def trains(self) -> bool:
        """There is a trainer."""
        return self.recipe.task in ("rl", "sft")

    @property
    def serves(self) -> bool:
        """There are engines."""
        return self.recipe.task != "sft"

    @property
    def disaggregated(self) -> bool:
        """Prefill and decode are separate."""
        return isinstance(self.recipe.deployment.inference, Disaggregated)

    @property
    def dense(self) -> bool:
        """The model is known to have no experts."""
        return self.shape is not None and self.shape.experts is None

    @property
    def trainer_gpus(self) -> int:
        """GPUs of the trainer; 0 if there is none."""
        return sum(request.nodes * request.gpus for request in self.requests if request.role == "train")

    def engines(self) -> list[tuple[ResourceRequest, EngineSettings]]:
        """List the roles that run engines, with their settings."""
        return [
            (request, settings_of(self.recipe, ENGINE_ROLES[request.role]))
            for request in self.requests
            if request.role in ENGINE_ROLES
        ]

    def expert_groups(self) -> list[tuple[ResourceRequest, EngineSettings, int]]:
        """List the roles that run engines, with their settings, and over how many GPUs each spreads the experts."""
        return [(request, settings, expert_ranks(self.recipe, request)) for request, settings in self.engines()]

    def gpus(self) -> list[Gpu]:
        """Known GPUs that run engines or the trainer."""
        if self.site.device != "cuda":
            return []
        return [gpu for request in self.requests if request.gpus and (gpu := gpu_of(request.kind))]

    def option(self, name: str) -> object:
        """Look up a vLLM option that is passed on as it is, of any role; None if no role has it.

        vLLM takes names with dashes, any unambiguous beginning of a name, and `no_NAME` for `NAME: false`.
        """
        inference = self.recipe.inference
        for settings in (inference.prefill, inference.decode, inference):
            for given, value in settings.vllm_extra.items():
                plain = given.replace("-", "_")
                if name.startswith(plain):
                    return value
                if plain == f"no_{name}":
                    return not value
        return None


@dataclass(frozen=True)
class Rule:
    """Two things that do not go together. `finds` says what is the case, or an empty string if the rule is kept."""

    name: str
    level: Literal["error", "warning"]
    field: str
    rule: str
    """The rule in words, for the table in the docs."""
    finds: Callable[[RuleContext], str]
    fix: str
    source: str
    """Where the fact is from."""
