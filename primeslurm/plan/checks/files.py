"""Check the files that a recipe names: model and data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primeslurm.base.errors import Violation
from primeslurm.base.model_files import ModelNotFoundError, locate, model_directory
from primeslurm.base.paths import REPOSITORY, in_checkout, is_file
from primeslurm.models.catalog import catalog
from primeslurm.models.hf_config import shape_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan.checks.checkpoint_tensors import tensor_problems
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.teacher import TeacherEngines

_DEMO_FILE = re.compile(r"(?:.*/)?\.primeslurm/([a-z0-9-]+)/(?:model|random|demonstrations\.jsonl)/?")
# Commands of a checkout that create the files of a demo
_IN_CHECKOUT = {
    "reverse-text": "./just warm-start",
    "tool-use": "./just warm-start tool-use",
    "hangman": "./just warm-start hangman",
}
_ANYWHERE = {"smollm2": "primeslurm install --model smollm2"}


def made_by(path: str) -> str:
    """Return which command creates a demo's model or data; empty for other paths."""
    demo = _DEMO_FILE.fullmatch(path)
    if demo is None:
        return ""
    if command := _ANYWHERE.get(demo[1]):
        return f"`{command}` makes it"
    command = _IN_CHECKOUT.get(demo[1], "")
    return command and (f"`{command}` makes it" if in_checkout() else f"a checkout of {REPOSITORY} makes it")


@dataclass(frozen=True)
class ModelFiles:
    """Shape, source and problems of a model's files."""

    shape: ModelShape | None  # None if neither a config.json that can be read nor the catalog has it
    model_type: str | None  # model type in its config, if known
    source: str
    problems: tuple[Violation, ...] = ()  # why the model cannot be used
    absent: Finding | None = None  # finding if the model is not on this machine


def model_files(recipe: Recipe) -> ModelFiles:
    """Look up the recipe's model in its config.json, or else in the catalog."""
    path = recipe.model.path
    try:
        directory = locate(path)
    except ModelNotFoundError as error:
        return _absent(recipe, error.why)
    config = _config(directory)
    if config is None:
        return ModelFiles(None, None, "", (Violation("model.path", path, "has no readable config.json"),))
    problems = []
    if not any(directory.glob("*.safetensors")):
        problems.append(Violation("model.path", path, "has no safetensors files"))
    limit = config.get("max_position_embeddings")
    problems += _too_long(recipe, limit if isinstance(limit, int) else None)
    try:
        shape = shape_of(config)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        shape = None  # the config is damaged, or not that of a decoder
    if any(directory.glob("*.safetensors")):
        problems += tensor_problems(directory, config, shape)
    return ModelFiles(shape, config.get("model_type"), str(directory / "config.json"), tuple(problems))


def _absent(recipe: Recipe, why: str) -> ModelFiles:
    path = recipe.model.path
    absent = Finding(level="blocked", field="model.path", value=path, **_missing(path, why))
    entry = catalog().get(path)
    if entry is None:
        return ModelFiles(None, None, "", absent=absent)
    problems = tuple(_too_long(recipe, entry.shape.max_positions))
    source = f"catalog: {entry.source}" + "".join(f"; assumed: {what}" for what in entry.assumed)
    return ModelFiles(entry.shape, entry.shape.model_type, source, problems, absent)


def _missing(path: str, why: str) -> dict[str, str]:
    if made := made_by(path):
        return {"text": "does not exist", "fix": made}
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return {"text": f"is {why} on this machine", "fix": f"`hf download {path}` on the shared file system"}
    return {
        "text": f"is not a directory on this machine, and {why}",
        "fix": "set a directory, or a hub id in the cache",
    }


def _too_long(recipe: Recipe, limit: int | None) -> list[Violation]:
    if limit is None or recipe.max_len <= limit:
        return []
    return [
        Violation(
            "seq_len", str(recipe.max_len), f"the model's max_position_embeddings is {limit}", f"nearest: {limit}"
        )
    ]


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths of the models and data that exist here."""
    # Processes run in other directories.
    update: dict[str, object] = {}
    if (directory := model_directory(recipe.model.path)) is not None:
        update["model"] = recipe.model.model_copy(update={"path": str(directory)})
    if isinstance(recipe.teacher, TeacherEngines) and (directory := model_directory(recipe.teacher.path)) is not None:
        update["teacher"] = recipe.teacher.model_copy(update={"path": str(directory)})
    speculation, engines = recipe.inference.speculative, dict[str, object]()
    if speculation and speculation.model and (directory := model_directory(speculation.model)) is not None:
        engines["speculative"] = speculation.model_copy(update={"model": str(directory)})
    if recipe.inference.model and (directory := model_directory(recipe.inference.model)) is not None:
        engines["model"] = str(directory)
    update["inference"] = recipe.inference.model_copy(update=engines)
    if recipe.sft is not None:
        data = recipe.sft.data.model_copy(update={"path": str(Path(recipe.sft.data.path).absolute())})
        update["sft"] = recipe.sft.model_copy(update={"data": data})
    return recipe.model_copy(update=update)


def absent_engine_models(recipe: Recipe) -> Iterator[Finding]:
    """Yield a finding for each model beside the policy that engines load and this machine does not have."""
    if recipe.task == "sft":
        return
    speculation = recipe.inference.speculative
    for field, path in (("speculative.model", speculation and speculation.model), ("model", recipe.inference.model)):
        if not path:
            continue
        try:
            locate(path)
        except ModelNotFoundError as error:
            yield Finding(level="blocked", field=f"inference.{field}", value=path, **_missing(path, error.why))


def engine_checkpoint_problems(recipe: Recipe, policy: ModelShape | None) -> list[Violation]:
    """Return why `inference.model` is not the policy in FP8 blocks; nothing if it is not on this machine."""
    path = recipe.inference.model
    directory = model_directory(path) if path and recipe.task != "sft" else None
    if path is None or directory is None:
        return []
    try:
        shape = shape_of(_config(directory) or {})
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return [Violation("inference.model", path, "has no readable config.json")]
    if not shape.fp8_blocks:
        return [Violation("inference.model", path, "is not stored in FP8 blocks of 128 x 128", "leave it out")]
    if shape.fp8_powers:
        why = "its scales are powers of two, and policies are published with scales that are not"
        return [Violation("inference.model", path, why, "leave it out")]
    storage = {name: getattr(shape, name) for name in ("quantization", "fp8_blocks", "fp8_powers")}
    if policy is not None and replace(policy, **storage) != shape:
        return [Violation("inference.model", path, f"has other layers than {recipe.model.path}", "use the same model")]
    return []


def absent_data(recipe: Recipe) -> Finding | None:
    if recipe.task != "sft" or recipe.sft is None or is_file(Path(recipe.sft.data.path)):
        return None
    path = recipe.sft.data.path
    fix = made_by(path) or "give a file with one JSON object per line"
    return Finding(level="blocked", field="sft.data.path", value=path, text="does not exist", fix=fix)


def _config(directory: Path) -> dict[str, Any] | None:
    try:
        value = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
