"""Findings of the checks on a recipe, without a plan, and plans for machines with GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primeslurm.api.checks.recipe_check import read_file_metadata
from primeslurm.api.sites import local_site
from primeslurm.plan.checks.run_checks import check_run
from primeslurm.plan.forecast import Estimate
from primeslurm.plan.model import Finding, Plan
from primeslurm.plan.planner import Planned, RecipeFiles, derive, requests_of, try_plan
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.reading.recipe_files import load_recipe


def make_plan(recipe: Recipe, site: Site, run_dir: Path, files: RecipeFiles | None = None) -> Planned:
    """Return the plan of a whole run. Fail if it cannot be placed."""
    problems, _, planned = try_plan(recipe, site, run_dir, files or read_file_metadata(recipe))
    assert planned is not None, problems
    return planned


def reviewed(recipe: Recipe, site: Site) -> tuple[list[Finding], Estimate | None]:
    """Return all findings about a recipe on a site, and the estimate."""
    files, (requests, _) = read_file_metadata(recipe), requests_of(recipe, site, local=False)
    return check_run(recipe, site, requests, files.model, files.teacher)


def plan_on_gpus(directory: Path, gpus: int, recipe: Path, config: Mapping[str, Any], **settings: object) -> Plan:
    """Return the plan of a recipe for one machine with `gpus` GPUs and a model with this `config.json`.

    Fail if a check reports an error. A setting may be a path below `directory`.
    """
    (directory / "config.json").write_text(json.dumps(config))
    for gpu in range(gpus):
        (directory / f"nvidia{gpu}").touch()
    words = [f"{key}={value}" for key, value in {"model.path": directory, **settings}.items()]
    loaded, site = load_recipe(recipe, words), local_site(directory / "runs", directory)
    findings, _ = reviewed(loaded, site)
    assert not [finding for finding in findings if finding.level in ("error", "blocked")]
    return derive(loaded, site, directory)
