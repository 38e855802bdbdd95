"""Trying a recipe's environments before it is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address

from primeslurm.errors import Violation
from primeslurm.plan.checks.environments import Interpreter, places, try_all
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sandbox_rules import PROVIDER_KEYS

_FIELD = "environments"


def environment_problems(recipe: Recipe, site: Site, *, local: bool) -> tuple[list[Violation], list[Finding]]:
    """Load every environment of a recipe with the Python that jobs will use, where that is here.

    Args:
        recipe: the recipe, with its model's absolute path; without rollouts it has no environments.
        site: names the Python; where it is to run.
        local: without Slurm.

    Returns:
        Why the run would fail; and what could not be looked at here, or not everybody wants.
    """
    if not recipe.samples:
        return [], []
    interpreter = Interpreter(site.python or "python3", _variables(site) | ({} if local else _kept_back(recipe, site)))
    if recipe.slurm.over(site.slurm).container is not None and not local:
        return [], [_untried("they are in the image that jobs run in")]
    if not interpreter.here:
        return [], [_untried(f"{interpreter.python} is not on this host")]
    tried = try_all(places(recipe.trained_environments, recipe.evaluation_environments), recipe.model, interpreter)
    if tried.unprepared and (site.modules or site.prologue) and not local:
        return [], [_untried(f"{interpreter.python} has no {tried.unprepared} without the site's modules and prologue")]
    if tried.unprepared:
        why = f"this Python has no {tried.unprepared}, and jobs run it"
        fix = "install primeslurm with its environments there, or name another one in the site file"
        return [Violation("python", interpreter.python, why, fix)], []
    notes = [_note(each) for each in tried.notes]
    if local or _is_this_machine(site):
        return [*tried.violations, *tried.missing], notes
    return list(tried.violations), [*(_elsewhere(each) for each in tried.missing), *notes]


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


def _elsewhere(violation: Violation) -> Finding:
    """Nodes may have what this host lacks."""
    text = f"{violation.value}: {violation.why}; the nodes are looked at when the job starts"
    return Finding(level="warning", field=violation.field, text=text, fix=violation.fix)


def _note(violation: Violation) -> Finding:
    return Finding(level="note", field=violation.field, text=f"{violation.value}: {violation.why}", fix=violation.fix)
