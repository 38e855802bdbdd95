"""What engines of a LoRA run get: the adapter alone, which vLLM applies at run time, or merged weights. Pure."""

from __future__ import annotations

from primeslurm.models import EXPERTS, family_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan.commands.engine import ADAPTER_RANKS
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.deployment import Disaggregated
from primeslurm.recipe.sections.routers import VllmRouter
from primeslurm.recipe.sections.teacher import PolicyTeacher
from primeslurm.recipe.sections.trainer import Lora


def resolved(recipe: Recipe, shape: ModelShape | None) -> Lora | None:
    """Return `trainer.lora` with `engines` filled in if it is open."""
    lora = recipe.trainer.lora
    if lora is None or lora.engines != "auto" or recipe.tenant is not None:
        return lora
    return lora.model_copy(update={"engines": "merged" if obstacle(recipe, shape) else "adapter"})


def reason(recipe: Recipe, shape: ModelShape | None) -> str:
    """Return what engines get and why, for people. Empty if the run trains no adapter for engines."""
    lora = recipe.trainer.lora
    if recipe.task != "rl" or lora is None:
        return ""
    if recipe.tenant is not None:
        return "the deployment's engines load the adapter that a request names"
    why = "as trainer.lora.engines says" if lora.engines != "auto" else obstacle(recipe, shape)
    if lora.engines == "adapter" or not why:
        return "engines get only the adapter"
    return f"engines get merged weights, {why if lora.engines != 'auto' else f'because {why}'}"


def obstacle(recipe: Recipe, shape: ModelShape | None) -> str:
    """Return why engines cannot apply the adapter of a LoRA run at run time. Empty if they can."""
    lora, inference = recipe.trainer.lora, recipe.inference
    assert lora is not None
    if recipe.task != "rl":
        return f"task {recipe.task} updates no engines"
    if shape is None:
        return "the shape of the model is unknown"
    if untested := untested_model(recipe, shape, lora.targets):
        return untested
    reasons = {
        f"vLLM has ranks up to {ADAPTER_RANKS[-1]}": lora.rank > ADAPTER_RANKS[-1],
        "weights.transport is nccl": recipe.weights.transport == "nccl",
        "vLLM drops adapters if an engine of an expert-parallel group is idle": inference.expert_parallel,
        "adapters were not tested with prefill and decode engines": isinstance(
            recipe.deployment.inference, Disaggregated
        ),
        f"adapters were not tested behind {inference.router.type}": not isinstance(inference.router, VllmRouter),
        "vllm-router gives no credit for cached blocks to requests for an adapter": inference.reads_kv_events,
        "a teacher that is the policy scores with the model alone": isinstance(recipe.teacher, PolicyTeacher),
        "adapters were not tested with speculative decoding": inference.speculative,
        "vLLM's kernels for adapters are not batch-invariant": inference.batch_invariant,
    }
    return next((text for text, applies in reasons.items() if applies), "")


def untested_model(recipe: Recipe, shape: ModelShape, targets: tuple[str, ...] | None = None) -> str:
    """Return why vLLM cannot apply adapters on these targets of the model; by default, on all that can be trained."""
    family = family_of(shape.model_type)
    if family is None or recipe.model.impl == "hf":
        return f"vLLM's adapters were not tested with {shape.model_type}"
    trained = targets or family.lora_targets - (frozenset() if shape.experts else EXPERTS)
    untested = set(trained) - family.model_types[shape.model_type].engine_lora
    return (
        f"vLLM's adapters on {', '.join(sorted(untested))} were not tested with {shape.model_type}" if untested else ""
    )
