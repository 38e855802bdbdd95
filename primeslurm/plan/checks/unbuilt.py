"""What recipes may say but this version's trainer does not do yet: one row each, deleted when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from primeslurm.plan.catalog import ModelFacts
from primeslurm.plan.families import FAMILIES, Capabilities
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe


@dataclass(frozen=True)
class Gap:
    """A field, and when what it asks for is not built."""

    field: str
    what: str
    asked: Callable[[Recipe], object]
    fix: str


@dataclass(frozen=True)
class Feature:
    """A field, and which capability of a family what it asks for needs."""

    field: str
    what: str
    asked: Callable[[Recipe], object]
    fix: str
    built: Callable[[Capabilities], bool]


FEATURES = (
    Feature("trainer.fp8", "FP8 training", lambda r: r.trainer.fp8, "false", lambda c: c.fp8),
    Feature("trainer.lora", "LoRA", lambda r: r.trainer.lora, "leave it out", lambda c: c.lora),
)
GAPS = (
    Gap("trainer.optimizer.type", "optimizer but AdamW", lambda r: r.trainer.optimizer.type != "adamw", "adamw"),
    Gap("trainer.router_replay", "router replay", lambda r: r.trainer.router_replay, "false"),
    Gap("trainer.parallelism.ep_backend", "DeepEP", lambda r: r.trainer.parallelism.ep_backend != "torch", "torch"),
    Gap("trainer.memory", "optimizer offload", lambda r: r.trainer.memory.optimizer_offload, "leave it out"),
    Gap("trainer.memory", "activation offload", lambda r: r.trainer.memory.activation_offload, "leave it out"),
    Gap("trainer.memory", "logits in chunks", lambda r: r.trainer.memory.lm_head_chunk, "leave it out"),
    Gap("weights.transport", "weight updates over NCCL", lambda r: r.task == "rl" and r.weights.transport == "nccl",
        "filesystem"),
)  # fmt: skip


def unbuilt(recipe: Recipe, facts: ModelFacts | None, family: str | None) -> list[Finding]:
    """What the trainer of this version does not do. `family` is the model's type, where it is known."""
    if recipe.task == "serve":
        return []
    found: list[Finding] = []
    if family is not None and family not in FAMILIES:
        text = f"model type {family!r} is not one the trainer builds"
        found.append(Finding(level="blocked", field="model.path", text=text, fix=f"valid: {', '.join(FAMILIES)}"))
    if family in FAMILIES:
        found += [
            Finding(level="blocked", field=f.field, text=f"the trainer has no {f.what} for {family} yet", fix=f.fix)
            for f in FEATURES
            if f.asked(recipe) and not f.built(FAMILIES[family])
        ]
    if facts is not None and facts.quantization is not None:
        text = f"the checkpoint is stored in {facts.quantization}, the trainer reads bfloat16 or float32"
        found.append(Finding(level="blocked", field="model.path", text=text, fix="convert it to bfloat16 first"))
    return found + [
        Finding(level="blocked", field=gap.field, text=f"the trainer has no {gap.what} yet", fix=gap.fix)
        for gap in GAPS
        if gap.asked(recipe)
    ]
