"""Rules of a tenant's run: what a Tinker service cannot train, and what the deployment decides."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.deployment import Deployment
from primeslurm.recipe.sections.inference import Inference
from primeslurm.recipe.sections.teacher import ServedTeacher
from primeslurm.recipe.sections.tenant import ALPHA
from primeslurm.recipe.sections.trainer import Lora, Memory, Parallelism

_OF_DEPLOYMENT = "the deployment has the nodes and engines, which all tenants share"
_PASSES = "the Tinker service computes the passes with the deployment's settings"
_WHOLE = "a Tinker service writes adapters and checkpoints whole"
_TEACHER = "a tenant has no engines of its own, and the deployment's score no prompts"
_ENTROPIES = "may read entropies, which a Tinker service does not return"
_APPLIED = "the deployment's engines apply adapters, and no merged weights are written"
_ONLY_ADAPTERS = "a Tinker service trains only adapters"
_TEMPERATURE = "a Tinker service returns log-probabilities at temperature 1 only"


def violations(recipe: Recipe) -> list[Violation]:
    """Return every setting that a tenant's run cannot have."""
    if recipe.tenant is None:
        return []
    trainer, teacher, out = recipe.trainer, recipe.teacher, "leave it out"
    lora, weights, checkpoint = trainer.lora or Lora(), recipe.weights, recipe.checkpoint
    owned = teacher is None or isinstance(teacher, ServedTeacher)
    # True if a setting is refused; its field and value, the reason, and the fix.
    refused: list[tuple[object, str, str, str, str]] = [
        (recipe.task != "rl", "task", recipe.task, "a tenant's run is an RL run", "use task: rl"),
        (recipe.deployment != Deployment(), "deployment", "", _OF_DEPLOYMENT, out),
        (recipe.inference != Inference(), "inference", "", _OF_DEPLOYMENT, out),
        (not owned, "teacher.type", teacher.type if teacher else "", _TEACHER, "use type: served"),
        (recipe.model.vlm, "model.vlm", "", "a Tinker service trains on text only", out),
        (weights.transport == "nccl", "weights.transport", "nccl", "engines read adapters from files", out),
        (weights.deltas, "weights.deltas", "true", _WHOLE, out),
        (checkpoint.local, "checkpoint.local", checkpoint.local or "", _WHOLE, out),
        (checkpoint.moments != "float32", "checkpoint.moments", checkpoint.moments, _WHOLE, out),
        (trainer.lora is None, "trainer.lora", "", _ONLY_ADAPTERS, "add `lora: {rank: 16}`"),
        (
            lora.alpha != ALPHA,
            "trainer.lora.alpha",
            f"{lora.alpha:g}",
            f"scales are {ALPHA:g} / rank",
            f"use {ALPHA:g}",
        ),
        (lora.targets, "trainer.lora.targets", ", ".join(lora.targets or ()), "all linear layers are adapted", out),
        (lora.engines == "merged", "trainer.lora.engines", "merged", _APPLIED, out),
        (lora.save_adapter, "trainer.lora.save_adapter", "true", _APPLIED, out),
        (trainer.optimizer.type != "adamw", "trainer.optimizer.type", trainer.optimizer.type, _PASSES, "use adamw"),
        (trainer.loss.type == "custom", "trainer.loss.type", "custom", _ENTROPIES, "use another loss"),
        (trainer.parallelism != Parallelism(), "trainer.parallelism", "", _PASSES, out),
        (trainer.memory != Memory(), "trainer.memory", "", _PASSES, out),
        (trainer.draft_layer, "trainer.draft_layer", "", _PASSES, out),
        (trainer.fp8, "trainer.fp8", "true", _PASSES, out),
        (trainer.router_replay, "trainer.router_replay", "true", _PASSES, out),
        (trainer.compile, "trainer.compile", "true", _PASSES, out),
        (trainer.prefix_sharing, "trainer.prefix_sharing", "true", _PASSES, out),
    ]
    for index, each in enumerate(recipe.trained_environments):
        own = each.sampling.temperature is not None
        field = f"{f'environments.{index}' if own else 'orchestrator'}.sampling.temperature"
        temperature = recipe.sampling(each).temperature
        refused.append((temperature != 1, field, f"{temperature:g}", _TEMPERATURE, "use 1"))
    found = [Violation(field, value, why, fix) for applies, field, value, why, fix in refused if applies]
    return list(dict.fromkeys(found))  # environments share a default
