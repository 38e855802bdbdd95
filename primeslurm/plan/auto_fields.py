"""Fields that a recipe may leave open and the planner fills in."""

from __future__ import annotations

from primeslurm.models import family_of
from primeslurm.plan.forecast import Estimate
from primeslurm.recipe import Recipe


def resolve_auto_fields(recipe: Recipe, model_type: str | None, device: str) -> Recipe:
    """Return the recipe with `trainer.compile` set to true or false if it is open.

    Args:
        model_type: `model_type` of the model's config.json; None if it is unknown.
        device: device of the trainer ranks, "cuda" or "cpu".
    """
    if recipe.trainer.compile is not None:
        return recipe
    compiles = _compiles(recipe, model_type, device)
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"compile": compiles})})


def _compiles(recipe: Recipe, model_type: str | None, device: str) -> bool:
    """Whether compiled layers have been tested with every training mode that the recipe uses."""
    trainer = recipe.trainer
    if device != "cuda" or recipe.model.dtype != "bfloat16" or trainer.parallelism.ep_backend == "deepep":
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
