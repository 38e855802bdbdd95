"""Fields that a recipe may leave open and the planner fills in: compilation, weight transport, sizes."""

from __future__ import annotations

from primeslurm.models.registry import family_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan import lora_engines
from primeslurm.plan.forecast import Estimate
from primeslurm.plan.model import WeightTransport
from primeslurm.recipe import Recipe


def resolve_auto_fields(recipe: Recipe, model_type: str | None, device: str, shape: ModelShape | None = None) -> Recipe:
    """Return the recipe with `trainer.compile`, `trainer.lora.engines` and `weights.transport` filled in if open.

    Args:
        model_type: `model_type` of the model's config.json; None if it is unknown.
        device: device of the trainer ranks and engines, "cuda" or "cpu".
    """
    transport = choose_transport(recipe, device).transport
    trainer = recipe.trainer
    if trainer.compile is None:
        trainer = trainer.model_copy(update={"compile": _compiles(recipe, model_type, device)})
    trainer = trainer.model_copy(update={"lora": lora_engines.resolved(recipe, shape)})
    weights = recipe.weights.model_copy(update={"transport": transport})
    return recipe.model_copy(update={"trainer": trainer, "weights": weights})


def choose_transport(recipe: Recipe, device: str, shape: ModelShape | None = None) -> WeightTransport:
    """Return the transport of new weights, and the reason. `device` is as in `resolve_auto_fields`."""
    transport, about_adapter = _transport(recipe, device), lora_engines.reason(recipe, shape)
    if about_adapter:
        transport = transport.model_copy(update={"reason": f"{transport.reason}; {about_adapter}"})
    return transport


def _transport(recipe: Recipe, device: str) -> WeightTransport:
    if recipe.weights.transport != "auto":
        return WeightTransport(transport=recipe.weights.transport, reason="set by the recipe")
    reasons_for_files = {
        f"task {recipe.task} updates no engines": recipe.task != "rl",
        "trainer and engines use no GPUs": device != "cuda",
        "trainer and engines share GPUs": recipe.colocated,
        "the run trains LoRA adapters": recipe.trainer.lora is not None,
        "weights.keep asks for published policies": "keep" in recipe.weights.model_fields_set,
        "weights.deltas publishes policies": recipe.weights.deltas,
        "batch-invariant engines use other NCCL settings": recipe.inference.batch_invariant,
    }
    reason = next((reason for reason, applies in reasons_for_files.items() if applies), None)
    if reason is not None:
        return WeightTransport(transport="filesystem", reason=reason)
    return WeightTransport(transport="nccl", reason="trainer and engines have separate GPUs")


def _compiles(recipe: Recipe, model_type: str | None, device: str) -> bool:
    """Whether compiled layers have been tested with every training mode that the recipe uses."""
    trainer = recipe.trainer
    if device != "cuda" or recipe.tenant is not None:
        return False
    if recipe.model.dtype != "bfloat16" or trainer.parallelism.ep_backend == "deepep":
        return False
    if model_type is None or recipe.model.impl == "hf" or recipe.model.vlm is not None:
        return False
    family = family_of(model_type)
    tested_modes = family.model_types[model_type].compiled_with if family else None
    cp_style = trainer.parallelism.cp_style if trainer.parallelism.cp > 1 else None
    modes = {
        "fp8": trainer.fp8,
        "lora": trainer.lora,
        "router_replay": trainer.router_replay,
        "cp": cp_style == "ulysses",
        "all-gathered cp": cp_style == "allgather",
        "one expert after the other": not trainer.grouped_mm,
    }
    return tested_modes is not None and {mode for mode, used in modes.items() if used} <= tested_modes


def with_kv_cache_size(recipe: Recipe, estimate: Estimate | None) -> Recipe:
    """Return the recipe with the KV cache size of engines that share GPUs with the trainer, if the estimate has one."""
    # Without a size, vLLM measures how much memory of the whole GPU disappears while it profiles. An engine that
    # restarts beside a working trainer would count the trainer's memory as its own.
    role = next((role for role in estimate.roles if role.role == "inference"), None) if estimate else None
    if not recipe.colocated or recipe.inference.kv_cache_bytes or role is None or not role.kv_tokens:
        return recipe
    size = role.kv_tokens * role.kv_bytes_per_token
    return recipe.model_copy(update={"inference": recipe.inference.model_copy(update={"kv_cache_bytes": size})})
