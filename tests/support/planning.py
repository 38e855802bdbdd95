"""Findings of the checks on a recipe, without a plan."""

from __future__ import annotations

from primeslurm.api.checks.recipe_check import look_at_files
from primeslurm.plan.checks.run_checks import check_run
from primeslurm.plan.forecast import Estimate
from primeslurm.plan.model import Finding
from primeslurm.plan.planner import requests_of
from primeslurm.recipe import Recipe, Site


def reviewed(recipe: Recipe, site: Site) -> tuple[list[Finding], Estimate | None]:
    """Return all findings about a recipe on a site, and the estimate."""
    files, (requests, _) = look_at_files(recipe), requests_of(recipe, site, local=False)
    return check_run(recipe, site, requests, files.model, files.teacher)
