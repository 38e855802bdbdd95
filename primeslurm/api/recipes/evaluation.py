"""Evaluation as a job of its own: of a model that a recipe names, or of a policy that a run has published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from primeslurm.api.recipes.loading import RECIPES, LoadedRecipe, load
from primeslurm.api.runs.run import find_run
from primeslurm.api.sites import runs_directory
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.paths import is_dir, is_file
from primeslurm.recipe.reading.recipe_files import file_or_ready, load_recipe
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.wire.weight_transfer import filesystem

TASK = ("task=eval", "teacher=null")
"""What is changed in any recipe: nothing is trained, and no teacher is asked."""


def load_evaluation(
    what: str,
    *,
    step: int | None = None,
    runs: Path | None = None,
    site: Path | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    local: bool = False,
) -> LoadedRecipe:
    """Read the recipe of an evaluation: engines, environments of `evaluation`, and no trainer.

    Args:
        what: a recipe's file or the name of a ready recipe, whose model is evaluated; else a run, by name or directory.
        step: of the run, whose published policy is evaluated. Default: the newest.
        runs: directory of all runs.
        site: as of `load`.
        overrides: fields to set, as words `path=value`.
        name: name of the evaluation's run. Default: that of what is evaluated, with `-eval`.
        local: as of `load`.

    Raises:
        UsageError: recipe, site or step are wrong.
        RunError: there is no such run.
    """
    source, words = Path(what), (*TASK, *overrides)
    if not is_dir(runs_directory(runs) / what):
        source = file_or_ready(source)
    if is_file(source) or source.suffix in RECIPES:
        if step is not None:
            raise UsageError([Violation("--step", str(step), "is of runs, and this is a recipe", "leave it out")])
        name = name or f"{load_recipe(source, words).name}-eval"
    else:
        run = find_run(what, runs)
        source, found = run.path / recipe_record.FILE, _version(run.path, what, step)
        path = yaml.safe_dump(str(filesystem.version_dir(run.path.resolve(), found)))
        name, words = name or f"{run.path.name}-eval-{found}", (*TASK, f"model.path={path}", *overrides)
    return load(source, site=site, overrides=words, name=name, local=local)


def _version(run_dir: Path, run: str, step: int | None) -> int:
    """The published version that is asked for."""
    there = filesystem.published(run_dir)
    if step in there or (step is None and there):
        return there[-1] if step is None else step
    nearest = [f"nearest: {min(there, key=lambda found: abs(found - (step or 0)))}"] if there else []
    export = f"or `primeslurm export {run} DIR --step N`, and `eval` of the recipe with --set model.path=DIR"
    why = f"is not among the published policies in {run_dir / 'weights'}"
    raise UsageError([Violation("--step", "newest" if step is None else str(step), why, "; ".join([*nearest, export]))])
