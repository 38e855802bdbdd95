"""How two recipes or runs differ in what they would do."""

from __future__ import annotations

from pathlib import Path

from primeslurm.api.loading import load
from primeslurm.api.runs import find_run
from primeslurm.api.sites import runs_directory
from primeslurm.paths import is_dir
from primeslurm.plan.model import Plan
from primeslurm.recipe.reading.recipe_files import file_or_ready
from primeslurm.run.diff import Difference, diff

RECIPES = (".yaml", ".yml")


def compare(
    a: str, b: str, *, site: Path | None = None, runs: Path | None = None, local: bool = False
) -> list[Difference]:
    """List every difference of two plans, from the whole to the parts; none if they are the same.

    Args:
        a: a recipe's file, the name of a ready recipe, or the name or directory of a run.
        b: the same, for what it is held against.
        site: as of `load`, for recipes.
        runs: as of `find_run`, for runs.
        local: as of `load`, for recipes.

    Raises:
        UsageError: there is no such run, or a recipe cannot be planned.
        RunError: a run's plan cannot be read.
    """
    one, other = (_plan(side, site, runs, local) for side in (a, b))
    return diff(one, other)


def _plan(side: str, site: Path | None, runs: Path | None, local: bool) -> Plan:
    path = Path(side)
    if not is_dir(runs_directory(runs) / side):
        path = file_or_ready(path)
    if path.suffix in RECIPES and not is_dir(path):
        return load(path, site=site, local=local).plan()
    return find_run(side, runs).plan()
