"""Load a recipe's environments, or render its data, before the recipe is submitted."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Generic, TypeVar

from primeslurm.base import files
from primeslurm.base.errors import Violation
from primeslurm.base.paths import is_dir, is_file
from primeslurm.plan.checks.environments import Interpreter, ProbeReport, environments_by_field, probe_environments
from primeslurm.plan.checks.sft_files import Rendered, render_data
from primeslurm.plan.model import Finding, as_findings
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.rules.sandboxes import PROVIDER_KEYS
from primeslurm.wire.probe_messages import UNKNOWN

T = TypeVar("T", ProbeReport, Rendered)
_FIELD = "environments"
_HERE = "check with DIR/bin/primeslurm, which `primeslurm install --cpu --to DIR` installs"


def environment_problems(
    recipe: Recipe, site: Site, *, local: bool, skip: Collection[str] = ()
) -> tuple[list[Violation], list[Finding]]:
    """Load every environment of a recipe, with the Python of its jobs if this machine has it, else with this one.

    Paths in `recipe` must be absolute. Environments in `skip` (for example environments.0) are not loaded.

    Returns:
        Errors that would end the run; and warnings and notes, also about environments that could not be loaded here.
    """
    if not recipe.samples:
        return [], []
    environments = environments_by_field(recipe.trained_environments, recipe.evaluation_environments)
    environments = {place: each for place, each in environments.items() if place not in skip}
    probed = _probe(
        lambda python: probe_environments(environments, recipe.model, python, max_len=recipe.max_len),
        (recipe, site, local),
    )
    if isinstance(probed, Violation):
        return [probed], []
    result, notes = probed.result, probed.notes(_FIELD, "the nodes load them and their data before the models")
    if result is None:
        return [], notes
    violations = [_with_advice(each) for each in result.violations]
    notes += [*as_findings(result.warnings, "warning"), *as_findings(result.notes, "note")]
    if probed.why:
        return [], [*(_elsewhere(each) for each in (*violations, *result.missing)), *notes]
    if local or _all_loopback(site.network.addresses):  # as in an embedded cluster
        return [*violations, *result.missing], notes
    return violations, [*(_elsewhere(each) for each in result.missing), *notes]


def data_rendering_problems(recipe: Recipe, site: Site, *, local: bool) -> tuple[list[Violation], list[Finding]]:
    """Render SFT data, with the Python of the jobs if this machine has it, else with this one.

    Returns:
        Errors that would end the run; and warnings and notes, also about the token that ends a turn.
    """
    if recipe.task != "sft":
        return [], []
    probed = _probe(lambda python: render_data(recipe, python), (recipe, site, local))
    if isinstance(probed, Violation):
        return [probed], []
    result, notes = probed.result, probed.notes("sft.data", "the trainer reports lines that it cannot render")
    if result is None:
        return [], notes
    notes += [*as_findings(result.warnings, "warning"), *as_findings(result.notes, "note")]
    violations = list(result.violations)
    return ([], [*map(_elsewhere, violations), *notes]) if probed.why else (violations, notes)


@dataclass(frozen=True)
class _Probed(Generic[T]):
    result: T | None  # None if neither Python could be used
    why: str = ""  # why the Python of the jobs could not be used; empty if it was

    def notes(self, field: str, later: str) -> list[Finding]:
        """Return a note unless the Python of the jobs was used. `later` says what checks the same on the nodes."""
        if not self.why:
            return []
        if self.result is None:
            return [Finding(level="note", field=field, text=f"not checked here: {self.why}; {later}", fix=_HERE)]
        return [Finding(level="note", field=field, text=f"checked with {sys.executable}, because {self.why}; {later}")]


def _probe(probe: Callable[[Interpreter], T], jobs: tuple[Recipe, Site, bool]) -> _Probed[T] | Violation:
    """Probe with the Python of the jobs or, if it cannot be used on this machine, with the Python of this process.

    Returns a violation if the Python of the jobs lacks a package.
    """
    recipe, site, local = jobs
    interpreter = Interpreter(site.python or "python3", _variables(site) | ({} if local else _kept_back(recipe, site)))
    if recipe.slurm.over(site.slurm).container is not None and not local:
        why = "jobs run in a container image"
    elif not interpreter.here:
        why = f"{interpreter.python} is not on this host"
    else:
        result = probe(interpreter)
        if not result.missing_package:
            return _Probed(result)
        problem = _unprepared(interpreter, result.missing_package, site, local)
        if isinstance(problem, Violation):
            return problem
        why = problem
    result = probe(replace(interpreter, python=sys.executable))
    if result.missing_package:
        return _Probed(None, f"{why}, and {sys.executable} has no {result.missing_package}")
    return _Probed(result, why)


def _unprepared(interpreter: Interpreter, package: str, site: Site, local: bool) -> Violation | str:
    if (site.modules or site.prologue) and not local:
        return f"{interpreter.python} has no {package} without the site's modules and prologue"
    install = "`primeslurm install --gpu --to DIR` (or --cpu) installs a Python with it"
    use = "submit with DIR/bin/primeslurm" if local else "name DIR/bin/python as `python` in the site file"
    fix = f"{install}; {use}"
    return Violation("python", interpreter.python, f"this Python, which jobs use, has no {package}", fix)


def _with_advice(violation: Violation) -> Violation:
    """Add how to make an environment's module importable, unless its name is misspelt."""
    if violation.why != UNKNOWN or violation.fix.startswith("did you mean"):
        return violation
    module = violation.value.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    advice = ["install it (`pip install -e DIRECTORY`)"]
    here = _directory_of(module)
    directory = "/absolute/directory" if here is None else f"$PWD/{here}".removesuffix("/.")
    advice.append(f"or `export PYTHONPATH={directory}`, with `pass_env: [PYTHONPATH]` in the recipe")
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if relative := [entry for entry in entries if entry and not entry.startswith("/")]:
        advice.append(f"relative entries of PYTHONPATH ({', '.join(relative)}) are not used")
    return replace(violation, why=f"{UNKNOWN}: the module {module} cannot be imported", fix="; ".join(advice))


def _directory_of(module: str) -> Path | None:
    """Return the directory to import a module from: the working directory, or one directly below it."""
    directories = [Path()]
    with contextlib.suppress(OSError):  # the working directory may not be readable
        directories += [path for path in files.listing(Path()) if is_dir(path)]
    for directory in directories:
        if is_file(directory / f"{module}.py") or is_file(directory / module / "__init__.py"):
            return directory
    return None


def _variables(site: Site) -> dict[str, str]:
    env = {name: value for name, value in site.env.items() if "${" not in value}
    return {**env, "LD_LIBRARY_PATH": ":".join(site.library_path)} if site.library_path else env


def _kept_back(recipe: Recipe, site: Site) -> dict[str, str]:
    """Return sandbox provider keys that are set in this shell but do not reach jobs, as empty variables."""
    passed = {*site.env, *site.pass_env, *recipe.pass_env}
    return {name: "" for names in PROVIDER_KEYS.values() for name in names if name not in passed}


def _all_loopback(addresses: Mapping[str, str]) -> bool:
    try:
        return bool(addresses) and all(ip_address(address).is_loopback for address in addresses.values())
    except ValueError:
        return False


def _elsewhere(violation: Violation) -> Finding:
    # Nodes may have files or programs that this host lacks.
    text = f"{violation.why}; the nodes are checked when the job starts"
    return Finding(level="warning", field=violation.field, value=violation.value, text=text, fix=violation.fix)
