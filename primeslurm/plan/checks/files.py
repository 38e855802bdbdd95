"""The files that a recipe names: model and data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primeslurm.errors import Violation
from primeslurm.families.catalog import catalog
from primeslurm.families.config import shape_of
from primeslurm.families.shape import ModelShape
from primeslurm.model_files import ModelNotFoundError, locate, model_directory
from primeslurm.paths import REPOSITORY, in_checkout, is_file, shipped
from primeslurm.plan.checks.model_tensors import tensor_problems
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.teacher import TeacherEngines

_READY_MODEL = re.compile(r"(?:.*/)?\.primeslurm/([\w-]+)/(?:model|random)")
_DEMOS = ("reverse-text", "tool-use", "hangman")
"""Demos with a warm start, whose models `scripts/warm_start.sh` makes."""


@dataclass(frozen=True)
class ModelFiles:
    """What is known of the recipe's model."""

    shape: ModelShape | None
    """None if neither a config.json that this understands nor the catalog has it."""
    model_type: str | None
    """Of its config, where known."""
    source: str
    problems: tuple[Violation, ...] = ()
    """Why the model cannot be used."""
    absent: Finding | None = None
    """The model is a known one, but not here."""


def model_files(recipe: Recipe) -> ModelFiles:
    """Look at the recipe's model: its own config.json first, else the catalog."""
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
        problems.append(Violation("model.path", path, "holds no safetensors files"))
    limit = config.get("max_position_embeddings")
    problems += _too_long(recipe, limit if isinstance(limit, int) else None)
    try:
        shape = shape_of(config)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        shape = None  # not a decoder's config, or a damaged one
    if any(directory.glob("*.safetensors")):
        problems += tensor_problems(directory, config, shape)
    return ModelFiles(shape, config.get("model_type"), str(directory / "config.json"), tuple(problems))


def _absent(recipe: Recipe, why: str) -> ModelFiles:
    path = recipe.model.path
    looks_like_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    fix = f"`hf download {path}` on the shared file system" if looks_like_hub_id else "give a directory"
    entry = catalog().get(path)
    if command := _how_it_is_made(path):
        absent = Finding(level="blocked", field="model.path", text=f"{path} is not here yet", fix=command)
        return ModelFiles(None, None, "", (), absent)
    if entry is None:
        return ModelFiles(None, None, "", (Violation("model.path", path, f"no such directory, and {why}", fix),))
    text = f"{path} is {why} here"
    absent = Finding(level="blocked", field="model.path", text=text, fix=fix)
    problems = tuple(_too_long(recipe, entry.shape.max_positions))
    source = f"catalog: {entry.source}" + "".join(f"; assumed: {what}" for what in entry.assumed)
    return ModelFiles(entry.shape, entry.shape.model_type, source, problems, absent)


def _how_it_is_made(path: str) -> str:
    """How to make a model that ready recipes start from; empty for any other model."""
    match = _READY_MODEL.fullmatch(path)
    if match is None:
        return ""
    if is_file(shipped("requirements") / "models" / f"{match[1]}.txt"):
        return f"make it: `primeslurm install --model {match[1]}`"
    if match[1] not in _DEMOS:
        return ""
    return f"make it: `./just warm-start {match[1]}`" if in_checkout() else f"a checkout of {REPOSITORY} makes it"


def _too_long(recipe: Recipe, limit: int | None) -> list[Violation]:
    if limit is None or recipe.max_len <= limit:
        return []
    return [
        Violation(
            "seq_len", str(recipe.max_len), f"the model's max_position_embeddings is {limit}", f"nearest: {limit}"
        )
    ]


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Give the recipe its models and data as absolute paths, where they exist here: processes run elsewhere."""
    update: dict[str, object] = {}
    if (directory := model_directory(recipe.model.path)) is not None:
        update["model"] = recipe.model.model_copy(update={"path": str(directory)})
    if isinstance(recipe.teacher, TeacherEngines) and (directory := model_directory(recipe.teacher.path)) is not None:
        update["teacher"] = recipe.teacher.model_copy(update={"path": str(directory)})
    if recipe.sft is not None:
        data = recipe.sft.data.model_copy(update={"path": str(Path(recipe.sft.data.path).absolute())})
        update["sft"] = recipe.sft.model_copy(update={"data": data})
    return recipe.model_copy(update=update)


def absent_data(recipe: Recipe) -> Finding | None:
    """Say which training data is not there; None if it is, or none is asked for."""
    if recipe.task != "sft" or recipe.sft is None or is_file(Path(recipe.sft.data.path)):
        return None
    text = f"{recipe.sft.data.path}: no such file"
    return Finding(level="blocked", field="sft.data.path", text=text, fix="one JSON object a line")


def _config(directory: Path) -> dict[str, Any] | None:
    try:
        value = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
