"""Prepare an emulated run: a recipe without settings of one cluster, and an embedded cluster of the right size."""

from __future__ import annotations

import importlib.util
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from primeslurm.api.testbed import ClusterSpec, LoopbackPlace, default_directory, is_name, page_merging, site, up
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.units import count, gib
from primeslurm.plan.model import Plan
from primeslurm.plan.placement.resources import WITHOUT_GPUS, resource_requests
from primeslurm.plan.stand_ins import memory_mib
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.slurm import Slurm
from primeslurm.recipe.sections.teacher import ServedTeacher

# Fields of `slurm` that an emulated job uses. The others name resources of one real cluster.
KEPT_SLURM_FIELDS = ("time", "comment", "requeue", "max_attempts", "checkpoint_signal_s")


def for_emulation(recipe: Recipe) -> Recipe:
    """Return the recipe of an emulated run. Raises UsageError if a part of it has no stand-in."""
    if recipe.task != "rl":
        raise UsageError([Violation("task", recipe.task, "only rl runs have stand-ins", "leave out --emulate")])
    if recipe.tenant is not None:
        raise UsageError([Violation("tenant", "", "a deployment has no stand-in", "leave out --emulate")])
    if isinstance(recipe.teacher, ServedTeacher):
        why = "has no stand-in, because it would score made-up tokens"
        raise UsageError([Violation("teacher.type", recipe.teacher.type, why, "nearest: engines")])
    slurm = {field: getattr(recipe.slurm, field) for field in KEPT_SLURM_FIELDS}
    changed: dict[str, object] = {"slurm": Slurm(**slurm)}
    if environments := recipe.deployment.environments:  # parts of a node depend on the real cluster
        without_sizes = environments.model_copy(update={"cpus": None, "memory": None})
        changed["deployment"] = recipe.deployment.model_copy(update={"environments": without_sizes})
    return recipe.model_copy(update=changed)


def refuse_without_packages() -> None:
    """Raise UsageError if safetensors is missing: stand-ins write weights with it."""
    if importlib.util.find_spec("safetensors") is None:
        why = f"stand-ins need the run-time environment, and {sys.executable} has no safetensors"
        fix = "`primeslurm install --cpu --to DIR`, then use `DIR/bin/primeslurm`"
        raise UsageError([Violation("--emulate", "", why, fix)])


def cluster_for(recipe: Recipe) -> ClusterSpec:
    """Return an embedded cluster with exactly the nodes of the recipe. Raises UsageError."""
    spec = _spec(recipe.name)
    requests = resource_requests(recipe, site_of(spec))
    if recipe.deployment.layout == "one_node":
        requests = requests[:1]  # all roles share the node of the first one
    without = sum(request.nodes + request.spares for request in requests if request.role in WITHOUT_GPUS)
    total = sum(request.nodes + request.spares for request in requests)
    sized = replace(spec, nodes=total - without, control_nodes=without, merge_pages=page_merging.are_merged())
    sized.check()
    return sized


def _spec(run: str) -> ClusterSpec:
    """Return a cluster named `emulate-<run>`.

    An invalid name, or one that is too long for Unix sockets below the home directory, is cut and ends with a digest.
    So no two runs share a cluster.
    """
    name, digest = f"emulate-{run}", f"{zlib.crc32(run.encode()):08x}"
    names = [name] if is_name(name) else []
    names += [f"{re.sub(r'[^a-z0-9-]', '-', name)[:22]}-{digest}", f"emulate-{digest}"]
    specs = [ClusterSpec(each, default_directory(each), Path("runs").absolute()) for each in names]
    return next((spec for spec in specs if spec.has_short_path), specs[-1])


def site_of(spec: ClusterSpec) -> Site:
    """Return the site of an embedded cluster that is not up."""
    return site(spec, LoopbackPlace(0))


def refuse_too_large(plan: Plan, available_mib: int | None = None, *, merged: bool = False) -> None:
    """Raise UsageError if an emulated run does not fit into this machine's free memory.

    Without this check, the kernel would kill some of its processes. `merged` means that the kernel merges equal memory
    pages.
    """
    if available_mib is None:
        available_mib = psutil.virtual_memory().available >> 20
    needed = memory_mib(plan, merged=merged)
    if needed <= available_mib:
        return
    size = f"{count(plan.allocated, 'node')}, {sum(1 for _ in plan.processes())} processes"
    why = f"stand-ins need about {gib(needed / 1024)} of memory, and {gib(available_mib / 1024)} are free here"
    fix = (
        f"use fewer nodes, replicas or GPUs per node (about {plan.allocated * available_mib // needed} nodes would fit)"
    )
    raise UsageError([Violation("deployment", size, why, fix)])


@contextmanager
def running(spec: ClusterSpec, *, keep: bool) -> Iterator[Site]:
    """Start an embedded cluster, yield its site, and stop it at the end of the block unless `keep` is set.

    A cluster that was already up is never stopped. After an error, a cluster that was started here always is. Raises
    UsageError if programs are missing or the cluster's directory is in use, and ClusterError if it does not start.
    """
    cluster, started = up(spec)
    try:
        yield site(cluster.spec, cluster.place)
    except BaseException:
        if started:
            cluster.down()
        raise
    if started and not keep:
        cluster.down()
