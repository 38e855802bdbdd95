"""Whether the nodes that environment workers run on have enough for them."""

from __future__ import annotations

from primeslurm.plan.memory.gpus import GIB
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe
from primeslurm.recipe.fields.types import bytes_of
from primeslurm.recipe.rules.sandboxes import PROVIDER_KEYS
from primeslurm.recipe.sections.deployment import EnvironmentNodes
from primeslurm.recipe.sections.sandboxes import SUBPROCESS_DISK_GB, SUBPROCESS_MEMORY_GB, Runtime, SubprocessRuntime

FIELD = "deployment.environments"
GB = 10**9


def environment_capacity(recipe: Recipe, requests: list[ResourceRequest]) -> list[Finding]:
    """Find environment nodes that are too small or too many, and a head node that is too small without them."""
    workers = sum(environment.workers for environment in recipe.all_environments)
    asked = recipe.deployment.environments
    found: list[Finding] = []
    for request in requests:
        if asked is None and request.role == "control" and workers > request.kind.cpus:
            text = f"{workers} environment workers share the {request.kind.cpus} CPU cores of the head node"
            fix = "give them nodes of their own: deployment.environments"
            found.append(Finding(level="warning", field="environments", text=text, fix=fix))
        elif asked is not None and request.role == "environments":
            found += [*_node(recipe, asked, request, workers), *_spread(recipe, asked, workers)]
            found += _sandboxes(recipe, asked, _memory(recipe, asked, request))
    return found


def _node(recipe: Recipe, asked: EnvironmentNodes, request: ResourceRequest, workers: int) -> list[Finding]:
    """What the fullest node runs, against what it has."""
    most = -(-workers // asked.nodes)
    cores = asked.cpus or recipe.slurm.environments.cpus_per_task or request.kind.cpus
    found = []
    if most * asked.cpus_per_worker > cores:
        needed = f"{most} workers of {asked.cpus_per_worker:g} CPU cores"
        fix = "more nodes, fewer workers, or a smaller cpus_per_worker"
        found.append(_error(f"does not fit: a node runs {needed}, and has {cores}", fix))
    there = _memory(recipe, asked, request)
    if there and most * bytes_of(asked.memory_per_worker) > there:
        needed = f"{most} workers of {asked.memory_per_worker}"
        fix = "more nodes, fewer workers, or a smaller memory_per_worker"
        found.append(_error(f"does not fit: a node runs {needed}, and has {there / GIB:.0f} GiB", fix))
    return found


def _memory(recipe: Recipe, asked: EnvironmentNodes, request: ResourceRequest) -> float:
    """Bytes of a node that the job gets; 0 if nobody says."""
    memory = asked.memory or recipe.slurm.environments.mem or request.kind.mem
    return bytes_of(memory) if memory else (request.kind.memory_gib or 0) * GIB


def _sandboxes(recipe: Recipe, asked: EnvironmentNodes, there: float) -> list[Finding]:
    """What the sandboxes of a node's rollouts may take together, by their own limits, against its memory."""
    evenly = -(-recipe.max_inflight // asked.nodes)
    rollouts = min(evenly, asked.max_rollouts_per_node or evenly)
    ratios = sum(environment.ratio for environment in recipe.environments)
    limits = [environment.ratio / ratios * _sandbox_gb(environment.runtime) for environment in recipe.environments]
    needed = rollouts * sum(limits) * GB
    if not there or needed <= there:
        return []
    text = (
        f"{rollouts} rollouts of a node may take {needed / GIB:.0f} GiB by their limits, and it has {there / GIB:.0f}"
    )
    fix = "more nodes, max_rollouts_per_node, or lower runtime.limits (memory_gb, and subprocess's disk_gb)"
    return [_warning(text, fix)]


def _sandbox_gb(runtime: Runtime | None) -> float:
    """Most memory of the node that one rollout may take; 0 where nothing bounds it, or it is another's machine.

    Of an environment without `runtime` the check does not know whether its rollouts run a program at all.
    """
    if runtime is None or runtime.type in PROVIDER_KEYS:
        return 0.0
    if not isinstance(runtime, SubprocessRuntime):
        return runtime.limits.memory_gb or 0.0
    if runtime.trusted:
        return 0.0
    return (runtime.limits.memory_gb or SUBPROCESS_MEMORY_GB) + (runtime.limits.disk_gb or SUBPROCESS_DISK_GB)


def _spread(recipe: Recipe, asked: EnvironmentNodes, workers: int) -> list[Finding]:
    found = []
    if workers < asked.nodes:
        fix = "raise environments.workers, or lower nodes"
        found.append(_warning(f"{workers} workers leave {asked.nodes - workers} of {asked.nodes} nodes idle", fix))
    bound = (asked.max_rollouts_per_node or recipe.max_inflight) * asked.nodes
    if bound < recipe.max_inflight:
        text = f"{asked.nodes} nodes of {asked.max_rollouts_per_node} rollouts run {bound} of {recipe.max_inflight}"
        found.append(_warning(text, "more nodes, or raise max_rollouts_per_node"))
    return found


def _error(text: str, fix: str) -> Finding:
    return Finding(level="error", field=FIELD, text=text, fix=fix)


def _warning(text: str, fix: str) -> Finding:
    return Finding(level="warning", field=FIELD, text=text, fix=fix)
