"""Load a recipe that only evaluates: the model of a recipe, or a published policy of a run."""

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

# Overrides that turn any recipe into an evaluation: no training, no teacher, and no other model in the engines.
TASK = (
    *("task=eval", "teacher=null", "inference.model=null"),
    *("deployment.spares.train=0", "deployment.spares.teacher=0"),
)
# Time limits of a run that do not fit its evaluation. They follow from estimates again.
_OPEN = ("slurm.checkpoint_signal_s=null", "trainer.hang_timeout_s=null")


def load_evaluation(
    target: str,
    *,
    step: int | None = None,
    runs: Path | None = None,
    site: Path | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    local: bool = False,
) -> LoadedRecipe:
    """Load the recipe of an evaluation, which has engines and the environments of `evaluation`, but no trainer.

    `target` is a recipe file or ready recipe, whose model is evaluated; or the name or directory of a run, of which the
    policy published at `step` (by default the newest) is evaluated. By default, the evaluation is named after recipe or
    run, with `-eval`. Other arguments are as for `load`. Raises UsageError, and RunError if the run does not exist.
    """
    source, words = Path(target), (*TASK, *overrides)
    if not is_dir(runs_directory(runs) / target):
        source = file_or_ready(source)
    if is_file(source) or source.suffix in RECIPES:
        if step is not None:
            raise UsageError(
                [Violation("--step", str(step), f"applies to runs only, and {target} is a recipe", "leave it out")]
            )
        name = name or f"{load_recipe(source, words).name}-eval"
    else:
        run = find_run(target, runs)
        source, version = run.path / recipe_record.FILE, _version(run.path, target, step)
        # Overrides are parsed as YAML, in which characters of a path may have a meaning.
        path = yaml.safe_dump(str(filesystem.version_dir(run.path.resolve(), version)))
        words = (*TASK, *_OPEN, f"model.path={path}", *overrides)
        name = name or f"{run.path.name}-eval-{version}"
    return load(source, site=site, overrides=words, name=name, local=local)


def _version(run_dir: Path, run: str, step: int | None) -> int:
    manifests = {v: filesystem.read_manifest(filesystem.version_dir(run_dir, v)) for v in filesystem.published(run_dir)}
    # Engines of an evaluation load whole models.
    versions = [version for version, manifest in manifests.items() if manifest and manifest.layout == "hf"]
    # Deltas between checkpoints do not count: the newest whole version is evaluated instead.
    complete = [version for version, manifest in manifests.items() if not manifest or manifest.layout != "delta"]
    if step is None and versions and versions[-1] == max(complete):
        return versions[-1]
    if step in versions:
        return step
    wanted = max(manifests, default=0) if step is None else step
    nearest = [f"nearest: {min(versions, key=lambda version: abs(version - wanted))}"] if versions else []
    export = f"or `primeslurm export {run} DIR --step N`, and `eval` of the recipe with --set model.path=DIR"
    why = f"is not among the published policies in {run_dir / 'weights'}"
    if len(versions) < len(manifests):
        why = f"{why}, of which {len(manifests) - len(versions)} are adapters or deltas without the model"
    raise UsageError([Violation("--step", "newest" if step is None else str(step), why, "; ".join([*nearest, export]))])
