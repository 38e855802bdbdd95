"""Check for recipe fields that the trainer does not support with the model's family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from primeslurm.models import GENERIC, capabilities, model_types
from primeslurm.models.shape import ModelShape
from primeslurm.plan.lora_engines import untested_model
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import VllmRouter


@dataclass(frozen=True)
class FamilyNeed:
    """A field that only some model families support."""

    field: str
    feature: str
    is_used: Callable[[Recipe], object]
    fix: str
    capability: str  # name of the field of `Capabilities`


NEEDS = (
    FamilyNeed("trainer.parallelism.ep", "expert parallelism", lambda r: r.trainer.parallelism.ep > 1, "ep: 1", "ep"),
    FamilyNeed("trainer.parallelism.cp", "context parallelism", lambda r: r.trainer.parallelism.cp > 1, "cp: 1", "cp"),
    FamilyNeed("trainer.fp8", "FP8", lambda r: r.trainer.fp8, "false", "fp8"),
    FamilyNeed("trainer.compile", "compiled layers", lambda r: r.trainer.compile, "false", "compile"),
    FamilyNeed("trainer.lora", "LoRA", lambda r: r.trainer.lora, "leave it out", "lora"),
    FamilyNeed("trainer.draft_layer", "training of draft layers", lambda r: r.trainer.draft_layer, "leave it out",
        "draft_layer"),
    FamilyNeed("trainer.router_replay", "router replay", lambda r: r.trainer.router_replay, "false", "router_replay"),
    FamilyNeed("trainer.prefix_sharing", "shared prefixes", lambda r: r.trainer.prefix_sharing, "false",
        "prefix_sharing"),
    FamilyNeed("model.vlm", "training on images", lambda r: r.model.vlm, "leave it out", "images"),
    FamilyNeed("trainer.memory", "logits in chunks", lambda r: r.trainer.memory.lm_head_chunk, "leave it out",
        "head_chunks"),
    FamilyNeed("model.head_dtype", "logits of another dtype", lambda r: r.model.head_dtype != "model", "model",
        "head_dtype"),
    FamilyNeed("trainer.memory", "offload to host memory",
        lambda r: r.trainer.memory.optimizer_offload or r.trainer.memory.activation_offload, "leave it out", "offload"),
)  # fmt: skip


def unsupported(recipe: Recipe, shape: ModelShape | None, model_type: str | None) -> list[Finding]:
    """Return findings of level `blocked` for what the trainer does not support."""
    if recipe.task in ("serve", "eval"):
        return []
    findings = _router_problems(recipe)
    if recipe.task == "tenants" and shape is not None and (text := untested_model(recipe, shape)):
        findings.append(Finding(level="error", field="model.path", value=recipe.model.path, text=text))
    if model_type is not None:
        findings += _missing_capabilities(recipe, model_type) + _vlm_problems(recipe, model_type, shape)
    if shape is not None and (text := _quantised_checkpoint(recipe, shape)):
        converts = shape.four_bits or shape.fp8_blocks
        fix = (
            f"primeslurm convert {recipe.model.path} DIR, and model.path: DIR" if converts else "convert it to bfloat16"
        )
        findings.append(Finding(level="blocked", field="model.path", text=text, fix=fix))
    return findings


def _router_problems(recipe: Recipe) -> list[Finding]:
    if recipe.model.vlm is None or recipe.task != "rl" or isinstance(recipe.inference.router, VllmRouter):
        return []
    text = f"rollouts with images were not tried behind {recipe.inference.router.type}"
    return [Finding(level="blocked", field="inference.router.type", text=text, fix="vllm-router")]


def _vlm_problems(recipe: Recipe, model_type: str, shape: ModelShape | None) -> list[Finding]:
    """Check the fields of `model.vlm`, which depend on whether the trainer knows the model's parts."""
    vlm = recipe.model.vlm
    if vlm is None:
        return []
    if capabilities(model_type, recipe.model.impl) is not GENERIC:
        named = "vision_encoder" if vlm.vision_encoder else "language_model" if vlm.language_model else ""
        text = f"the trainer's implementation of {model_type!r} knows its parts"
        fix = "leave it out, or model.impl: hf"
        return [Finding(level="blocked", field=f"model.vlm.{named}", text=text, fix=fix)] if named else []
    if shape is not None and not shape.has_vision:
        text, fix = f"{model_type!r} has no encoder of images (no vision_config)", "leave it out"
    elif recipe.task == "rl":
        text = "rollouts with images were not tried with the transformers implementation"
        seeing = [name for name, able in model_types().items() if able.images]
        fix = f"task: sft, or a model type of {', '.join(seeing)}"
    else:
        return []
    return [Finding(level="blocked", field="model.vlm", text=text, fix=fix)]


def _missing_capabilities(recipe: Recipe, model_type: str) -> list[Finding]:
    able = capabilities(model_type, recipe.model.impl)
    if able is None:
        text = f"the trainer has no implementation of its own for model type {model_type!r}"
        fix = f"impl: auto or hf, or a model type of {', '.join(model_types())}"
        return [Finding(level="blocked", field="model.impl", text=text, fix=fix)]
    whose = "the transformers implementation" if able is GENERIC else "the trainer's implementation"
    return [
        Finding(
            level="blocked", field=need.field, text=f"{whose} of {model_type!r} has no {need.feature}", fix=need.fix
        )
        for need in NEEDS
        if need.is_used(recipe) and not getattr(able, need.capability)
    ]


def _quantised_checkpoint(recipe: Recipe, shape: ModelShape) -> str:
    """Return why a quantised checkpoint cannot be trained."""
    if shape.quantization is None:
        return ""
    able = capabilities(shape.model_type, recipe.model.impl)
    readable = [name for name in ("int4", "mxfp4") if able is not None and getattr(able, f"{name}_checkpoint")]
    if shape.four_bits in readable:
        taken = (
            f"policies in {recipe.model.dtype} are not for engines that start from a checkpoint in {shape.four_bits}"
        )
        return taken if recipe.task == "rl" else ""
    if not (shape.fp8_blocks and able is not None and able.fp8_checkpoint):
        reads = ", ".join(["bfloat16", "float32", *readable])
        return f"the checkpoint is stored in {shape.quantization}, the trainer reads {reads} or block-scale FP8"
    if recipe.task == "rl" and shape.fp8_powers:
        return "its scales are powers of two, and policies are published with scales that are not"
    return ""
