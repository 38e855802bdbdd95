"""Options that several verbs share, and the loading that they mean."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.errors import UsageError, Violation
from primeslurm.plan.checks import absent_data, advise, model_files, review, teacher_problems, with_absolute_paths
from primeslurm.plan.derive import derive
from primeslurm.plan.local import local_site
from primeslurm.plan.model import Finding, Plan
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.load import load_recipe, load_site
from primeslurm.recipe.paths import expanded, is_file

SITE_FILES = (Path("site.yaml"), Path("~/.primeslurm/site.yaml"))

RecipeArg = Annotated[Path, typer.Argument(help="Recipe file.", show_default=False)]
SetOpt = Annotated[list[str] | None, typer.Option("--set", help="Override a field.", metavar="KEY=VALUE")]
NameOpt = Annotated[str | None, typer.Option("--name", help="Name of the run instead of the recipe's.")]
SiteOpt = Annotated[
    Path | None, typer.Option("--site", help="Site file. Default: ./site.yaml or ~/.primeslurm/site.yaml")
]
LocalOpt = Annotated[bool, typer.Option("--local", help="Run on this machine without Slurm.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


@dataclass(frozen=True)
class Loaded:
    """A recipe worked out for a site."""

    recipe: Recipe
    site: Site
    plan: Plan


def find_site(path: Path | None, local: bool = False) -> Site:
    """The site file to use. Raises UsageError."""
    if local and path is None:
        return _with_libraries(local_site(Path("runs").resolve()))
    candidates = [path] if path else [expanded(candidate) for candidate in SITE_FILES]
    for candidate in candidates:
        if path or is_file(candidate):
            site = load_site(candidate)
            return _with_libraries(site.model_copy(update={"runs": str(_runs(candidate, site.runs))}))
    why = f"no site file: looked for {', '.join(str(c) for c in SITE_FILES)}"
    fix = "`primeslurm cluster up` makes an emulated cluster with one, or use --local"
    raise UsageError([Violation("--site", "", why, fix)])


def _runs(site_file: Path, runs: str) -> Path:
    """The site's directory of runs, which is relative to its file. Raises UsageError."""
    try:
        return (site_file.resolve().parent / Path(runs).expanduser()).resolve()
    except (OSError, RuntimeError) as error:  # no such user's home, a loop of links
        raise UsageError([Violation("runs", runs, str(error), "give an absolute path")]) from None


def _with_libraries(site: Site) -> Site:
    """The site with a UCX built in this checkout first on its library path."""
    built = Path(__file__).resolve().parents[2] / "third_party" / "ucx" / "lib"
    return site.model_copy(update={"library_path": (str(built), *site.library_path)}) if built.is_dir() else site


def load(
    recipe_file: Path,
    site_file: Path | None,
    overrides: list[str] | None,
    name: str | None,
    local: bool,
    need_files: bool = True,
) -> Loaded:
    """Recipe + site -> Plan with findings. Raises UsageError with what is wrong in any of them, all at once."""
    problems: list[Violation] = []
    recipe: Recipe | None = None
    site: Site | None = None
    try:
        recipe = load_recipe(recipe_file, overrides or (), name)
    except UsageError as error:
        problems += error.violations
    try:
        site = find_site(site_file, local)
    except UsageError as error:
        problems += error.violations
    if recipe is None:
        raise UsageError(problems)
    model = model_files(recipe)
    if need_files:
        problems += [*model.problems, *teacher_problems(recipe)]
    if site is None:
        raise UsageError(problems)
    site = site.model_copy(update={"python": site.python or sys.executable})
    findings, estimate = review(recipe, site, model)
    recipe = with_absolute_paths(recipe)
    try:
        plan = derive(recipe, site, Path(site.runs) / recipe.name, local=local)
    except UsageError as error:
        raise UsageError([*problems, *error.violations, *refusals(findings, "error")]) from None
    if problems:
        raise UsageError([*problems, *refusals(findings, "error")])
    findings += [*advise(recipe, plan), *([data] if (data := absent_data(recipe)) else [])]
    return Loaded(recipe, site, plan.model_copy(update={"findings": tuple(findings), "estimate": estimate}))


def refuse(plan: Plan, *levels: str) -> None:
    """Raise UsageError if the plan has findings of these levels."""
    if found := refusals(plan.findings, *levels):
        raise UsageError(found)


def refusals(findings: Iterable[Finding], *levels: str) -> list[Violation]:
    """Findings of these levels as violations."""
    return [Violation(f.field, "", f.text, f.fix) for f in findings if f.level in levels]
