"""Rules of a tenant's run: what a Tinker service cannot train, and what the deployment decides."""

from __future__ import annotations

from collections.abc import Iterator

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.deployment import Deployment
from primeslurm.recipe.sections.inference import Inference
from primeslurm.recipe.sections.losses import CustomLoss
from primeslurm.recipe.sections.teacher import ServedTeacher
from primeslurm.recipe.sections.tenant import ALPHA
from primeslurm.recipe.sections.trainer import Lora, Memory, Parallelism

_LEAVE_OUT = "leave it out"


def violations(recipe: Recipe) -> list[Violation]:
    """Return every setting that a tenant's run cannot have."""
    return [] if recipe.tenant is None else [*_of_run(recipe), *_of_trainer(recipe), *_temperatures(recipe)]


def _of_run(recipe: Recipe) -> Iterator[Violation]:
    if recipe.task != "rl":
        yield Violation("task", recipe.task, "a tenant's run is an RL run", "use task: rl")
    for field, is_set in {
        "deployment": recipe.deployment != Deployment(),
        "inference": recipe.inference != Inference(),
    }.items():
        if is_set:
            yield Violation(field, "", "the deployment has the nodes and engines, which all tenants share", _LEAVE_OUT)
    teacher = recipe.teacher
    if teacher is not None and not isinstance(teacher, ServedTeacher):
        why = "a tenant has no engines of its own, and the deployment's score no prompts"
        yield Violation("teacher.type", teacher.type, why, "use type: served")
    if recipe.model.vlm is not None:
        yield Violation("model.vlm", "", "a Tinker service trains on text only", _LEAVE_OUT)
    if recipe.weights.transport == "nccl":
        why = "engines read adapters from files"
        yield Violation("weights.transport", "nccl", why, "use filesystem, or leave it out")
    for field, is_set in {
        "weights.deltas": recipe.weights.deltas,
        "checkpoint.local": recipe.checkpoint.local is not None,
        "checkpoint.moments": recipe.checkpoint.moments != "float32",
    }.items():
        if is_set:
            yield Violation(field, "", "a Tinker service writes adapters and checkpoints whole", _LEAVE_OUT)


def _of_trainer(recipe: Recipe) -> Iterator[Violation]:
    trainer = recipe.trainer
    if trainer.lora is None:
        yield Violation("trainer.lora", "", "a Tinker service trains only adapters", "add `lora: {rank: 16}`")
    else:
        yield from _of_lora(trainer.lora)
    if trainer.optimizer.type != "adamw":
        yield Violation("trainer.optimizer.type", trainer.optimizer.type, "a Tinker service has only AdamW", "adamw")
    if isinstance(trainer.loss, CustomLoss):
        why = "may read entropies, which a Tinker service does not return"
        yield Violation("trainer.loss.type", trainer.loss.type, why, "use a loss of primeslurm")
    for field, is_set in {
        "parallelism": trainer.parallelism != Parallelism(),
        "memory": trainer.memory != Memory(),
        "draft_layer": trainer.draft_layer,
        "fp8": trainer.fp8,
        "router_replay": trainer.router_replay,
        "compile": trainer.compile,
    }.items():
        if is_set:
            why = "the Tinker service computes the passes, in one rank and with its own settings"
            yield Violation(f"trainer.{field}", "", why, _LEAVE_OUT)


def _of_lora(lora: Lora) -> Iterator[Violation]:
    if lora.alpha != ALPHA:
        why = f"a Tinker service scales adapters by {ALPHA:g} / rank"
        yield Violation("trainer.lora.alpha", f"{lora.alpha:g}", why, f"use {ALPHA:g}")
    if lora.targets is not None:
        why = "a Tinker service adapts all linear layers"
        yield Violation("trainer.lora.targets", ", ".join(lora.targets), why, _LEAVE_OUT)
    if lora.engines == "merged" or lora.save_adapter:
        field = "engines" if lora.engines == "merged" else "save_adapter"
        why = "the deployment's engines apply adapters, and no merged weights are written"
        yield Violation(f"trainer.lora.{field}", str(getattr(lora, field)).lower(), why, _LEAVE_OUT)


def _temperatures(recipe: Recipe) -> Iterator[Violation]:
    for index, environment in enumerate(recipe.trained_environments):
        temperature = recipe.sampling(environment).temperature
        if temperature != 1:
            own = environment.sampling.temperature is not None
            field = f"environments.{index}.sampling" if own else "orchestrator.sampling"
            why = "a Tinker service returns log-probabilities at temperature 1 only"
            yield Violation(f"{field}.temperature", f"{temperature:g}", why, "use 1")
