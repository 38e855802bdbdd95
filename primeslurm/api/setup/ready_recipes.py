"""List and copy the ready recipes that ship with the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from primeslurm.base import durable, files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.paths import is_dir, shipped
from primeslurm.plan.planner import derive
from primeslurm.recipe.fields.suggestions import closest_ready_recipes
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site, ready_recipes

_END_OF_PURPOSE = re.compile(r": |\. |\.$")


@dataclass(frozen=True)
class ReadyRecipe:
    """A recipe that ships with the package."""

    name: str
    purpose: str  # one line, from the comment at the top of the file
    nodes: int  # number of nodes on the example site, including spares
    gpus: int
    path: Path


def list_recipes() -> list[ReadyRecipe]:
    """Return the ready recipes, ordered by number of GPUs."""
    site = load_site(shipped("sites") / "h200.yaml")
    ready = []
    for name, path in ready_recipes().items():
        totals = derive(load_recipe(path), site, Path("runs")).totals
        purpose = purpose_of(files.read_text(path))
        ready.append(ReadyRecipe(name, purpose, totals.nodes + totals.spares, totals.gpus, path))
    return sorted(ready, key=lambda recipe: (recipe.gpus, recipe.nodes, recipe.name))


def purpose_of(text: str) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    comment = " ".join(lines)
    end = _END_OF_PURPOSE.search(comment)
    return comment[: end.start()] if end else comment


def ready_recipe(name: str) -> Path:
    ready = ready_recipes()
    path = ready.get(name.removesuffix(".yaml"))
    if path is None:
        raise UsageError(
            [Violation("NAME", name, "there is no ready recipe of this name", closest_ready_recipes(name, list(ready)))]
        )
    return path


def recipe_text(name: str) -> str:
    """Return the text of a ready recipe. Raises UsageError if it does not exist."""
    return files.read_text(ready_recipe(name))


def copy_recipe(name: str, destination: Path | None = None) -> Path:
    """Copy a ready recipe to a new file or an existing directory; by default to NAME.yaml in the working directory.

    Raises UsageError if the recipe does not exist, or the file does.
    """
    target = destination or Path()
    if is_dir(target):
        target /= ready_recipe(name).name
    write_new({target: recipe_text(name)})
    return target


def write_new(texts: dict[Path, str]) -> None:
    """Write new files. If one of them exists, or a directory does not, none is written. Raises UsageError."""
    problems = [
        Violation(str(path), "", "already exists", "it is never overwritten; move it, or choose another name")
        for path in texts
        if files.exists(path)
    ]
    problems += [
        Violation(str(path), "", f"there is no directory {path.parent}", "create it first")
        for path in texts
        if not is_dir(path.parent)
    ]
    if problems:
        raise UsageError(problems)
    for path, text in texts.items():
        try:
            durable.write(path, text)
        except OSError as error:  # its own words would name a temporary file
            why = f"cannot be written: {error.strerror}"
            raise UsageError([Violation(str(path), "", why, "choose another directory")]) from None
