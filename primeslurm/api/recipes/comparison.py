"""Compare recipes and runs: what they ask for, and what they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primeslurm.api.recipes.loading import RECIPES, load
from primeslurm.api.runs.run import find_run
from primeslurm.api.sites import runs_directory
from primeslurm.base import files
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.paths import is_dir
from primeslurm.plan.model import Plan
from primeslurm.recipe.reading.recipe_files import file_or_ready
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.run.diff import Difference, diff, recipe_diff


@dataclass(frozen=True)
class Comparison:
    """How two recipes or runs differ."""

    a: Plan
    b: Plan
    recipe: list[Difference]
    """Fields of the recipes that differ. Empty if a run has no recipe that can be read."""
    plan: list[Difference]
    """Every difference of the plans, from the whole to the parts."""

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not (self.recipe or self.plan)


@dataclass(frozen=True)
class _Side:
    plan: Plan
    recipe: Mapping[str, Any]
    """The recipe as it is written."""
    resolved: Mapping[str, Any]
    """The recipe with absolute paths and with everything filled in that it leaves open."""
    is_run: bool


def compare(a: str, b: str, *, site: Path | None = None, runs: Path | None = None, local: bool = False) -> Comparison:
    """Compare two recipes or runs.

    Args:
        a: a recipe file, the name of a ready recipe, or the name or directory of a run.
        b: the other one.
        site: site file for recipes, as for `load`.
        runs: directory of runs, as for `find_run`.
        local: plan recipes for this machine, as for `load`.

    Raises:
        UsageError: a recipe cannot be planned.
        RunError: there is no such run, or its plan cannot be read.
    """
    one, other = _sides((a, b), site, runs, local)
    if one.is_run or other.is_run:  # a run keeps its resolved recipe only
        fields = recipe_diff(one.resolved, other.resolved) if one.resolved and other.resolved else []
    else:
        fields = recipe_diff(one.recipe, other.recipe)
    return Comparison(one.plan, other.plan, fields, diff(one.plan, other.plan))


def _sides(sides: Sequence[str], site: Path | None, runs: Path | None, local: bool) -> list[_Side]:
    """Plan both sides. Raises UsageError with what is wrong with either; what is wrong with both is said once."""
    planned, wrong = list[_Side](), dict[str, Sequence[Violation]]()
    for side in sides:
        try:
            planned.append(_side(side, site, runs, local))
        except UsageError as error:
            wrong[side] = error.violations
    if wrong:
        both = [each for each in wrong.get(sides[0], ()) if each in wrong.get(sides[1], ())]
        own = [
            replace(each, field=f"{side}: {each.field}") for side in wrong for each in wrong[side] if each not in both
        ]
        raise UsageError([*both, *own])
    return planned


def _side(side: str, site: Path | None, runs: Path | None, local: bool) -> _Side:
    path = Path(side)
    if not is_dir(runs_directory(runs) / side):
        path = file_or_ready(path)
    if path.suffix in RECIPES and not is_dir(path):
        loaded = load(path, site=site, local=local)
        planned = loaded.resolve()
        written, resolved = (
            recipe.model_dump(mode="json", by_alias=True) for recipe in (loaded.recipe, planned.recipe)
        )
        return _Side(planned.plan, written, resolved, is_run=False)
    run = find_run(side, runs)
    kept = files.read_json(run.path / recipe_record.FILE)
    return _Side(run.plan(), {}, kept if isinstance(kept, dict) else {}, is_run=True)
