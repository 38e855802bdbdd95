"""What an emulated run is given: a recipe without names of one cluster, and an embedded cluster of its size."""

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
from primeslurm.plan.emulate import memory_mib
from primeslurm.plan.model import Plan
from primeslurm.plan.placement.resources import WITHOUT_GPUS, resource_requests
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.slurm import Slurm
from primeslurm.recipe.sections.teacher import ServedTeacher

KEPT_SLURM_FIELDS = ("time", "comment", "requeue", "max_attempts", "checkpoint_signal_s")
"""What an emulated job takes over from the recipe's `slurm`; the rest names things of one real cluster."""


def for_emulation(recipe: Recipe) -> Recipe:
    """Make the recipe of a recipe's emulated run. Raises UsageError for what has no stand-in."""
    if recipe.task != "rl":
        raise UsageError([Violation("task", recipe.task, "only rl runs have stand-ins", "leave out --emulate")])
    if isinstance(recipe.teacher, ServedTeacher):
        why = "has no stand-in, and what stand-ins sample means nothing to it"
        raise UsageError([Violation("teacher.type", recipe.teacher.type, why, "nearest: engines")])
    kept = {field: getattr(recipe.slurm, field) for field in KEPT_SLURM_FIELDS}
    changed: dict[str, object] = {"slurm": Slurm(**kept)}
    if environments := recipe.deployment.environments:  # how much of a node is there, only a real cluster says
        alike = environments.model_copy(update={"cpus": None, "memory": None})
        changed["deployment"] = recipe.deployment.model_copy(update={"environments": alike})
    return recipe.model_copy(update=changed)


def refuse_without_packages() -> None:
    """Raise UsageError if the command line is installed alone: stand-ins save their versions with safetensors."""
    if importlib.util.find_spec("safetensors") is None:
        why = f"stand-ins need the run-time environment, and {sys.executable} has no safetensors"
        fix = "`primeslurm install --cpu --to DIR`, then use `DIR/bin/primeslurm`"
        raise UsageError([Violation("--emulate", "", why, fix)])


def cluster_for(recipe: Recipe) -> ClusterSpec:
    """Describe an embedded cluster of exactly the nodes that the recipe asks for. Raises UsageError."""
    spec = _spec(recipe.name)
    requests = resource_requests(recipe, site_of(spec))
    without = sum(request.nodes + request.spares for request in requests if request.role in WITHOUT_GPUS)
    total = sum(request.nodes + request.spares for request in requests)
    sized = replace(spec, nodes=total - without, control_nodes=without, merge_pages=page_merging.are_merged())
    sized.check()
    return sized


def _spec(run: str) -> ClusterSpec:
    """Return a cluster named `emulate-<run>`.

    A name that is not valid, or too long for Unix sockets below the home directory, is cut and ends with a digest, so
    that no two runs share a cluster.
    """
    name, digest = f"emulate-{run}", f"{zlib.crc32(run.encode()):08x}"
    names = [name] if is_name(name) else []
    names += [f"{re.sub(r'[^a-z0-9-]', '-', name)[:22]}-{digest}", f"emulate-{digest}"]
    specs = [ClusterSpec(each, default_directory(each), Path("runs").absolute()) for each in names]
    return next((spec for spec in specs if spec.has_short_path), specs[-1])


def site_of(spec: ClusterSpec) -> Site:
    """Describe the site of an embedded cluster that is not up."""
    return site(spec, LoopbackPlace(0))


def refuse_too_large(plan: Plan, available_mib: int | None = None, *, merged: bool = False) -> None:
    """Refuse an emulated run that does not fit into this machine's memory.

    Args:
        plan: of the run.
        available_mib: memory that is free; this machine's if left out.
        merged: the kernel merges equal pages of its processes.

    Raises:
        UsageError: the kernel would kill some of its processes.
    """
    if available_mib is None:
        available_mib = psutil.virtual_memory().available >> 20
    needed = memory_mib(plan, merged=merged)
    if needed <= available_mib:
        return
    size = f"{count(plan.allocated, 'node')}, {sum(1 for _ in plan.processes())} processes"
    why = f"stand-ins take about {gib(needed / 1024)} of memory, and {gib(available_mib / 1024)} are free here"
    fix = f"about {plan.allocated * available_mib // needed} such nodes would fit: fewer nodes, replicas, GPUs a node"
    raise UsageError([Violation("deployment", size, why, fix)])


@contextmanager
def running(spec: ClusterSpec, *, keep: bool) -> Iterator[Site]:
    """Start an embedded cluster, and end it with the block. One that was up before is left alone.

    Args:
        spec: the cluster.
        keep: leave it; after an error it ends in any case.

    Yields:
        Its site.

    Raises:
        UsageError: programs are missing, or its directory is in use otherwise.
        ClusterError: it does not start.
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
