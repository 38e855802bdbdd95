"""Trying a recipe's environments, or rendering its data, before it is submitted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from primeslurm.base import files
from primeslurm.base.errors import Violation
from primeslurm.base.paths import is_dir, is_file
from primeslurm.plan.checks.environments import Interpreter, environments_by_field, probe_environments
from primeslurm.plan.checks.sft_files import render_data
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.rules.sandboxes import PROVIDER_KEYS
from primeslurm.wire.probe_messages import UNKNOWN

_FIELD = "environments"


def environment_problems(
    recipe: Recipe, site: Site, *, local: bool, skip: Collection[str] = ()
) -> tuple[list[Violation], list[Finding]]:
    """Load every environment of a recipe with the Python that jobs will use, where that is here.

    Args:
        recipe: the recipe, with its model's absolute path; without rollouts it has no environments.
        site: names the Python; where it is to run.
        local: without Slurm.
        skip: environments that are not tried, for example environments.0.

    Returns:
        Why the run would fail; and what could not be looked at here, or not everybody wants.
    """
    if not recipe.samples:
        return [], []
    interpreter = _interpreter(recipe, site, local)
    if isinstance(interpreter, str):
        return [], [_untried(interpreter)]
    wanted = environments_by_field(recipe.trained_environments, recipe.evaluation_environments)
    wanted = {place: each for place, each in wanted.items() if place not in skip}
    tried = probe_environments(wanted, recipe.model, interpreter)
    if tried.missing_package:
        lacks = _unprepared(interpreter, tried.missing_package, site, local)
        return ([lacks], []) if isinstance(lacks, Violation) else ([], [_untried(lacks)])
    violations = [_with_advice(each) for each in tried.violations]
    warnings = [_note(each).model_copy(update={"level": "warning"}) for each in tried.warnings]
    notes = [*warnings, *map(_note, tried.notes)]
    if local or _is_this_machine(site):
        return [*violations, *tried.missing], notes
    return violations, [*(_elsewhere(each) for each in tried.missing), *notes]


def data_rendering_problems(recipe: Recipe, site: Site, *, local: bool) -> tuple[list[Violation], list[Finding]]:
    """Render data of SFT with the Python that jobs will use, where that is here.

    Args:
        recipe: the recipe, with absolute paths of its model and data.
        site: names the Python; where it is to run.
        local: without Slurm.

    Returns:
        Why the run would fail; and what could not be looked at here, and which token ends a turn.
    """
    if recipe.task != "sft":
        return [], []
    interpreter = _interpreter(recipe, site, local)
    if isinstance(interpreter, str):
        return [], [_unrendered(interpreter)]
    found = render_data(recipe, interpreter)
    if found.missing_package:
        lacks = _unprepared(interpreter, found.missing_package, site, local)
        return ([lacks], []) if isinstance(lacks, Violation) else ([], [_unrendered(lacks)])
    warnings = [_note(each).model_copy(update={"level": "warning"}) for each in found.warnings]
    return list(found.violations), [*warnings, *map(_note, found.notes)]


def _interpreter(recipe: Recipe, site: Site, local: bool) -> Interpreter | str:
    """The Python of jobs, or why it cannot be used here."""
    found = Interpreter(site.python or "python3", _variables(site) | ({} if local else _kept_back(recipe, site)))
    if recipe.slurm.over(site.slurm).container is not None and not local:
        return "jobs run in an image"
    return found if found.here else f"{found.python} is not on this host"


def _unprepared(interpreter: Interpreter, lacks: str, site: Site, local: bool) -> Violation | str:
    """What it means that a Python lacks a package: jobs do, too, unless they load modules first."""
    if (site.modules or site.prologue) and not local:
        return f"{interpreter.python} has no {lacks} without the site's modules and prologue"
    install = "`primeslurm install --gpu --to DIR` (or --cpu) makes a Python that has it"
    use = "submit with DIR/bin/primeslurm" if local else "name DIR/bin/python as `python` in the site file"
    fix = f"{install}; {use}"
    return Violation("python", interpreter.python, f"this Python has no {lacks}, and jobs run it", fix)


def _with_advice(violation: Violation) -> Violation:
    """Say how to make the module of an unknown environment importable, unless its name is misspelt."""
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
    """Find a module in the working directory or one below it: the directory to import it from."""
    directories = [Path()]
    with contextlib.suppress(OSError):  # the working directory may not be readable
        directories += [path for path in files.listing(Path()) if is_dir(path)]
    for directory in directories:
        if is_file(directory / f"{module}.py") or is_file(directory / module / "__init__.py"):
            return directory
    return None


def _variables(site: Site) -> dict[str, str]:
    """What processes get from the site, as far as it is known before a node is."""
    env = {name: value for name, value in site.env.items() if "${" not in value}
    return {**env, "LD_LIBRARY_PATH": ":".join(site.library_path)} if site.library_path else env


def _kept_back(recipe: Recipe, site: Site) -> dict[str, str]:
    """Keys of sandboxes' providers that may be set here, and that jobs do not get: as if they were not."""
    given = {*site.env, *site.pass_env, *recipe.pass_env}
    return {name: "" for names in PROVIDER_KEYS.values() for name in names if name not in given}


def _is_this_machine(site: Site) -> bool:
    """Whether all nodes of a site are this machine, as those of an embedded cluster are."""
    return _all_loopback(site.network.addresses)


def _all_loopback(addresses: Mapping[str, str]) -> bool:
    try:
        return bool(addresses) and all(ip_address(address).is_loopback for address in addresses.values())
    except ValueError:
        return False


def _untried(why: str) -> Finding:
    return Finding(level="note", field=_FIELD, text=f"not tried here: {why}; the nodes try them before anything loads")


def _unrendered(why: str) -> Finding:
    text = f"not rendered here: {why}; the trainer names lines that it cannot render"
    return Finding(level="note", field="sft.data", text=text)


def _elsewhere(violation: Violation) -> Finding:
    """Nodes may have what this host lacks."""
    text = f"{violation.why}; the nodes are checked when the job starts"
    return Finding(level="warning", field=violation.field, value=violation.value, text=text, fix=violation.fix)


def _note(violation: Violation) -> Finding:
    return Finding(level="note", field=violation.field, value=violation.value, text=violation.why, fix=violation.fix)
