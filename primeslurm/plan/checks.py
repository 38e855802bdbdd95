"""What is known to go wrong, said before anything is submitted. Each rule gives findings with reason and fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from primeslurm.errors import Violation
from primeslurm.plan.model import Finding, Plan
from primeslurm.recipe import Recipe

FAMILIES = ("qwen3", "qwen3_moe")
"""Values of `model_type` in config.json that the trainer builds."""


def check(recipe: Recipe, plan: Plan) -> tuple[Finding, ...]:
    """Advice about a recipe that can run but may not run well."""
    found: list[Finding] = []
    orchestrator = recipe.orchestrator
    if recipe.task == "rl":
        per_engine = recipe.max_inflight / max(plan.totals.engines, 1)
        hashed = recipe.inference.router.policy == "consistent_hash"
        if hashed and per_engine < 4:
            text = f"{recipe.max_inflight} rollouts over {plan.totals.engines} engines fill a hash ring unevenly"
            found.append(Finding(level="warning", field="inference.router.policy", text=text, fix="use round_robin"))
        lead = recipe.max_inflight / orchestrator.batch_size
        if lead > orchestrator.max_off_policy_steps + 1:
            bound = orchestrator.max_off_policy_steps
            text = f"{lead:.1f} batches in flight, but rollouts older than {bound} steps are dropped"
            fix = "lower it, or raise orchestrator.max_off_policy_steps"
            found.append(Finding(level="warning", field="orchestrator.max_inflight_rollouts", text=text, fix=fix))
    if recipe.checkpoint.interval > recipe.max_steps:
        text = f"only the last step ({recipe.max_steps}) is saved: a failure before it starts from the beginning"
        found.append(Finding(level="warning", field="checkpoint.interval", text=text))
    return tuple(found)


def model_directory(path: str) -> Path | None:
    """The directory that a model path or hub id means on this file system; None if it is not there."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    cache = os.environ.get("HF_HUB_CACHE")
    root = Path(cache) if cache else Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    snapshots = root / f"models--{path.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime) if snapshots.is_dir() else []
    return found[-1] if found else None


def model_problems(recipe: Recipe) -> list[Violation]:
    """Why the recipe's model cannot be used, as far as its files tell."""
    directory = model_directory(recipe.model.path)
    if directory is None:
        looks_like_hub_id = recipe.model.path.count("/") == 1 and not recipe.model.path.startswith((".", "/", "~"))
        fix = (
            f"`hf download {recipe.model.path}` on the shared file system" if looks_like_hub_id else "give a directory"
        )
        return [Violation("model.path", recipe.model.path, "no such directory, and not in the Hugging Face cache", fix)]
    config = _config(directory)
    if config is None:
        return [Violation("model.path", recipe.model.path, "has no readable config.json")]
    problems = []
    family = config.get("model_type")
    if family not in FAMILIES:
        why = f"model type {family!r} is not one the trainer builds"
        problems.append(Violation("model.path", recipe.model.path, why, f"valid: {', '.join(FAMILIES)}"))
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and recipe.max_len > limit:
        why = f"the model's max_position_embeddings is {limit}"
        problems.append(Violation("seq_len", str(recipe.max_len), why, f"nearest: {limit}"))
    if not any(directory.glob("*.safetensors")):
        problems.append(Violation("model.path", recipe.model.path, "holds no safetensors files"))
    return problems


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with its model and data as absolute paths, where they exist here: processes run elsewhere."""
    update: dict[str, object] = {}
    if (directory := model_directory(recipe.model.path)) is not None:
        update["model"] = recipe.model.model_copy(update={"path": str(directory)})
    if recipe.sft is not None:
        data = recipe.sft.data.model_copy(update={"path": str(Path(recipe.sft.data.path).resolve())})
        update["sft"] = recipe.sft.model_copy(update={"data": data})
    return recipe.model_copy(update=update)


def data_problems(recipe: Recipe) -> list[Violation]:
    """Why the training data cannot be used."""
    if recipe.task != "sft" or recipe.sft is None:
        return []
    path = recipe.sft.data.path
    return [] if Path(path).is_file() else [Violation("sft.data.path", path, "no such file")]


def _config(directory: Path) -> dict[str, Any] | None:
    try:
        value = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
