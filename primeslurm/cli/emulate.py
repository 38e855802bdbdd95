"""`submit --emulate`: the real job with light stand-ins, on an embedded cluster as large as the recipe asks for."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from primeslurm.cli.options import Loaded, find_site
from primeslurm.cli.output import note
from primeslurm.errors import UsageError, Violation
from primeslurm.plan.checks import Case, advise, conflicts, model_files
from primeslurm.plan.derive import derive
from primeslurm.plan.emulate import emulate
from primeslurm.plan.needs import needs_of
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.load import load_recipe
from primeslurm.recipe.scheduling import Slurm
from primeslurm.recipe.teacher import ServedTeacher
from primeslurm.slurm.cluster import default_directory, up
from primeslurm.slurm.cluster_config import ClusterSpec, Place, site

KEPT_SLURM_FIELDS = ("time", "comment", "requeue", "max_attempts", "checkpoint_signal_s")
"""What an emulated job takes over from the recipe's `slurm`; the rest names things of one real cluster."""


def load_emulated(
    recipe_file: Path, site_file: Path | None, overrides: list[str] | None, name: str | None
) -> tuple[Loaded, ClusterSpec | None]:
    """The emulated run of a recipe, and the cluster that it needs; None if `site_file` names one that is up.

    Neither model nor data have to be there. Raises UsageError.
    """
    recipe = load_recipe(recipe_file, overrides or (), name)
    if recipe.task != "rl":
        raise UsageError([Violation("task", recipe.task, "only rl runs have stand-ins", "leave out --emulate")])
    if isinstance(recipe.teacher, ServedTeacher):
        why = "has no stand-in, and what stand-ins sample means nothing to it"
        raise UsageError([Violation("teacher.type", recipe.teacher.type, why, "nearest: engines")])
    kept = {field: getattr(recipe.slurm, field) for field in KEPT_SLURM_FIELDS}
    recipe = recipe.model_copy(update={"slurm": Slurm(**kept)})
    if site_file is not None:
        return worked_out(recipe, find_site(site_file)), None
    spec = _spec(recipe)
    spec.check()
    return worked_out(recipe, site(spec, Place(0))), spec


def worked_out(recipe: Recipe, where: Site) -> Loaded:
    """The emulated plan of a recipe on a site. Raises UsageError."""
    where = where.model_copy(update={"python": where.python or sys.executable})
    plan = emulate(derive(recipe, where, Path(where.runs) / recipe.name))
    real = where.model_copy(update={"device": "cuda"})  # stand-ins contradict nothing, what they stand for may
    case = Case(recipe, real, needs_of(recipe, where), model_files(recipe).facts)
    findings = (*conflicts(case), *advise(recipe, plan))
    return Loaded(recipe, where, plan.model_copy(update={"findings": findings}))


@contextmanager
def running(spec: ClusterSpec, recipe: Recipe, keep: bool) -> Iterator[Loaded]:
    """Start the cluster; yields the run worked out for it. Unless `keep`, the cluster ends with the block."""
    note(f"starting an embedded cluster of {spec.nodes} GPU nodes and {spec.control_nodes} control nodes")
    cluster, _ = up(spec)
    try:
        yield worked_out(recipe, site(cluster.spec, cluster.place))
    except BaseException:
        cluster.down()
        raise
    if keep:
        note(f"end its cluster with: primeslurm cluster down --name {shlex.quote(spec.name)}")
    else:
        cluster.down()


def _spec(recipe: Recipe) -> ClusterSpec:
    """A cluster of exactly the nodes that the recipe asks for."""
    name = f"emulate-{re.sub(r'[^a-z0-9-]', '-', recipe.name)}"[:31].rstrip("-")
    spec = ClusterSpec(name, default_directory(name), Path("runs").absolute())
    needs = needs_of(recipe, site(spec, Place(0)))
    control = sum(need.nodes + need.spares for need in needs if need.role == "control")
    total = sum(need.nodes + need.spares for need in needs)
    return replace(spec, nodes=total - control, control_nodes=control)
