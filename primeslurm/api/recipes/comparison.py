"""Compare two recipes or runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primeslurm.api.recipes.loading import RECIPES, load
from primeslurm.api.runs.run import find_run
from primeslurm.api.sites import runs_directory
from primeslurm.base import files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.base.paths import is_dir
from primeslurm.plan.model import Plan
from primeslurm.recipe.reading.recipe_files import file_or_ready
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.run.diff import Difference, recipe_diff


@dataclass(frozen=True)
class Comparison:
    """The plans of two recipes or runs, and the fields that differ."""

    a: Plan
    b: Plan
    recipe: list[Difference]  # fields that differ


@dataclass(frozen=True)
class _Side:
    plan: Plan
    recipe: Mapping[str, Any]
    resolved: Mapping[str, Any]  # the recipe with absolute paths and all defaults
    is_run: bool


def compare(a: str, b: str, *, site: Path | None = None, runs: Path | None = None, local: bool = False) -> Comparison:
    """Compare two recipes or runs, each given as recipe file, name of a ready recipe, or name or directory of a run.

    `site` and `local` are as for `load`, and `runs` is as for `find_run`. Raises UsageError if a recipe cannot be
    planned, and RunError if a run does not exist or its plan or recipe cannot be read.
    """
    one, other = _sides((a, b), site, runs, local)
    if one.is_run or other.is_run:  # a run keeps its resolved recipe only
        fields = recipe_diff(one.resolved, other.resolved)
    else:
        fields = recipe_diff(one.recipe, other.recipe)
    return Comparison(one.plan, other.plan, fields)


def _sides(sides: Sequence[str], site: Path | None, runs: Path | None, local: bool) -> list[_Side]:
    """Plan both sides. Raises UsageError with the errors of both; errors that both have appear once."""
    planned, violations = list[_Side](), dict[str, Sequence[Violation]]()
    for side in sides:
        try:
            planned.append(_side(side, site, runs, local))
        except UsageError as error:
            violations[side] = error.violations
    if violations:
        shared = [each for each in violations.get(sides[0], ()) if each in violations.get(sides[1], ())]
        separate = [
            replace(each, field=f"{side}: {each.field}")
            for side, problems in violations.items()
            for each in problems
            if each not in shared
        ]
        raise UsageError([*shared, *separate])
    return planned


def _side(side: str, site: Path | None, runs: Path | None, local: bool) -> _Side:
    path = Path(side)
    if not is_dir(runs_directory(runs) / side):
        path = file_or_ready(path)
    if path.suffix in RECIPES and not is_dir(path):
        loaded = load(path, site=site, local=local)
        planned = loaded.resolve()
        fields, resolved = (recipe.model_dump(mode="json", by_alias=True) for recipe in (loaded.recipe, planned.recipe))
        return _Side(planned.plan, fields, resolved, is_run=False)
    run = find_run(side, runs)
    record = files.read_json(run.path / recipe_record.FILE)
    if not isinstance(record, dict):
        raise RunError(f"{run.path / recipe_record.FILE} is missing or damaged")
    return _Side(run.plan(), {}, record, is_run=True)
