"""Check that the nodes of environment workers have enough cores and memory."""

from __future__ import annotations

from primeslurm.plan.gpus import GIB
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
    """Return findings for environment nodes that are too small or too many, and for a head node that is too small."""
    workers = sum(environment.workers for environment in recipe.all_environments)
    nodes = recipe.deployment.environments
    findings: list[Finding] = []
    for request in requests:
        if nodes is None and request.role == "control" and workers > request.kind.cpus:
            text = f"{workers} environment workers share the {request.kind.cpus} CPU cores of the head node"
            fix = "set deployment.environments to give them their own nodes"
            findings.append(Finding(level="warning", field="environments", text=text, fix=fix))
        elif nodes is not None and request.role == "environments":
            findings += [*_node(recipe, nodes, request, workers), *_spread(recipe, nodes, workers)]
            findings += _sandboxes(recipe, nodes, _memory(recipe, nodes, request))
    return findings


def _node(recipe: Recipe, nodes: EnvironmentNodes, request: ResourceRequest, workers: int) -> list[Finding]:
    most = -(-workers // nodes.nodes)
    cores = nodes.cpus or recipe.slurm.environments.cpus_per_task or request.kind.cpus
    findings = []
    if most * nodes.cpus_per_worker > cores:
        needed = f"{most} workers of {nodes.cpus_per_worker:g} CPU cores"
        fix = "more nodes, fewer workers, or a smaller cpus_per_worker"
        findings.append(_error(f"does not fit: a node runs {needed}, but has {cores} cores", fix))
    memory = _memory(recipe, nodes, request)
    if memory and most * bytes_of(nodes.memory_per_worker) > memory:
        needed = f"{most} workers of {nodes.memory_per_worker}"
        fix = "more nodes, fewer workers, or a smaller memory_per_worker"
        findings.append(_error(f"does not fit: a node runs {needed}, but has {memory / GIB:.0f} GiB", fix))
    return findings


def _memory(recipe: Recipe, nodes: EnvironmentNodes, request: ResourceRequest) -> float:
    """Return the memory of a node that the job gets [bytes]; 0 if unknown."""
    memory = nodes.memory or recipe.slurm.environments.mem or request.kind.mem
    return bytes_of(memory) if memory else (request.kind.memory_gib or 0) * GIB


def _sandboxes(recipe: Recipe, nodes: EnvironmentNodes, memory: float) -> list[Finding]:
    evenly = -(-recipe.max_inflight // nodes.nodes)
    rollouts = min(evenly, nodes.max_rollouts_per_node or evenly)
    ratios = sum(environment.ratio for environment in recipe.environments)
    limits = [environment.ratio / ratios * _sandbox_gb(environment.runtime) for environment in recipe.environments]
    needed = rollouts * sum(limits) * GB
    if not memory or needed <= memory:
        return []
    text = (
        f"a node has {memory / GIB:.0f} GiB, but its {rollouts} rollouts may use {needed / GIB:.0f} GiB by their limits"
    )
    fix = "use more nodes, set max_rollouts_per_node, or lower runtime.limits (memory_gb, and disk_gb of subprocess)"
    return [_warning(text, fix)]


def _sandbox_gb(runtime: Runtime | None) -> float:
    """Return the most memory of the node that one rollout may use [GB]."""
    # 0 if nothing limits it, or if it runs on a provider's machine. Without `runtime` it is unknown whether rollouts
    # run a program at all.
    if runtime is None or runtime.type in PROVIDER_KEYS:
        return 0.0
    if not isinstance(runtime, SubprocessRuntime):
        return runtime.limits.memory_gb or 0.0
    if runtime.trusted:
        return 0.0
    return (runtime.limits.memory_gb or SUBPROCESS_MEMORY_GB) + (runtime.limits.disk_gb or SUBPROCESS_DISK_GB)


def _spread(recipe: Recipe, nodes: EnvironmentNodes, workers: int) -> list[Finding]:
    findings = []
    if workers < nodes.nodes:
        fix = "raise environments.workers, or lower nodes"
        findings.append(_warning(f"{workers} workers leave {nodes.nodes - workers} of {nodes.nodes} nodes idle", fix))
    bound = (nodes.max_rollouts_per_node or recipe.max_inflight) * nodes.nodes
    if bound < recipe.max_inflight:
        text = (
            f"{nodes.nodes} nodes with {nodes.max_rollouts_per_node} rollouts each run {bound} of {recipe.max_inflight}"
        )
        findings.append(_warning(text, "more nodes, or raise max_rollouts_per_node"))
    return findings


def _error(text: str, fix: str) -> Finding:
    return Finding(level="error", field=FIELD, text=text, fix=fix)


def _warning(text: str, fix: str) -> Finding:
    return Finding(level="warning", field=FIELD, text=text, fix=fix)
