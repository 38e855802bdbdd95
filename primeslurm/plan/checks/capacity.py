"""Compare what roles need with GPUs, hosts and disks, and what environment workers need with their nodes."""

from __future__ import annotations

import math
from typing import Literal

from primeslurm.base.units import duration, number
from primeslurm.plan.batch_job import node_memory
from primeslurm.plan.estimates.estimate import LONGEST_STEP, TYPICAL, TYPICAL_STEP
from primeslurm.plan.estimates.orchestrator_memory import BUFFERED
from primeslurm.plan.estimates.trainer_memory import LOCAL_COPIES, in_memory
from primeslurm.plan.forecast import Estimate, RoleMemory
from primeslurm.plan.gpus import GIB
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.fields.types import bytes_of
from primeslurm.recipe.rules.sandboxes import PROVIDER_KEYS
from primeslurm.recipe.sections.deployment import EnvironmentNodes
from primeslurm.recipe.sections.sandboxes import SUBPROCESS_DISK_GB, SUBPROCESS_MEMORY_GB, Runtime, SubprocessRuntime

# Error of the memory model. Within this share of the limit, the check warns instead of refusing.
MARGIN = 0.1
_ENVIRONMENTS = "deployment.environments"


def capacity(recipe: Recipe, site: Site, requests: list[ResourceRequest], estimate: Estimate) -> list[Finding]:
    """Return findings for roles that do not, or may not, fit their GPUs, hosts or disks."""
    findings: list[Finding] = []
    for role in estimate.roles:
        findings += _trainer(recipe, role) if role.role == "train" else _engines(recipe, role)
    findings += _host(requests, estimate) + _head(recipe, requests, estimate) + _disk(recipe, requests, estimate)
    findings += _last_checkpoint(recipe, site, requests, estimate) + _concurrency(recipe, estimate)
    return findings + _stall(recipe, estimate)


def _trainer(recipe: Recipe, role: RoleMemory) -> list[Finding]:
    if role.needed_gib <= role.limit_gib * (1 - MARGIN):
        return []
    largest = max(role.parts, key=lambda part: role.parts[part])
    sizes = ", ".join(f"{name} {size:g}" for name, size in role.parts.items() if size)
    fix = _remedy(recipe, largest)
    if largest == "gradients" and recipe.trainer.parallelism.reduce_gradients == "step":
        fix = "trainer.parallelism.reduce_gradients: micro_batch, or raise ep"
    text = f"needs {role.needed_gib:g} of {role.limit_gib:g} GiB per GPU: {sizes}"
    if recipe.colocated:
        fix = f"lower inference.gpu_memory_utilization, or {fix}"
    if role.needed_gib > role.limit_gib * (1 + MARGIN):
        return [Finding(level="error", field="deployment.train", text=f"does not fit: {text}", fix=fix)]
    return [Finding(level="warning", field="deployment.train", text=f"may not fit: {text}", fix=fix)]


def _remedy(recipe: Recipe, largest: str) -> str:
    """Return settings that reduce the largest part of a trainer GPU's memory and are not set yet."""
    trainer, vlm = recipe.trainer, recipe.model.vlm
    less_state = {"more nodes": False, "trainer.lora": trainer.lora is not None}
    full = trainer.parallelism.activation_checkpointing == "full"
    remedies: dict[str, dict[str, bool]] = {
        "optimizer": {
            **less_state,
            "trainer.memory.optimizer_state_offload: true": trainer.memory.optimizer_state_offload,
        },
        "gathered": {"raise trainer.parallelism.ep, because sharded experts are not gathered": False},
        "activations": {
            "raise trainer.parallelism.cp": False,
            "trainer.parallelism.activation_checkpointing: full": full,
            "trainer.memory.activation_offload: true": trainer.memory.activation_offload,
        },
        "images": {
            "a shorter seq_len": False,
            "trainer.parallelism.activation_checkpointing: full": full,
            "model.vlm.freeze_vision_encoder: true": vlm is None or vlm.freeze_vision_encoder,
        },
        "logits": {"a smaller trainer.memory.lm_head_chunk, for example 2048": False},
    }
    state = {**less_state, "trainer.memory.optimizer_offload: true": trainer.memory.optimizer_offload}
    *others, last = [text for text, is_set in remedies.get(largest, state).items() if not is_set]
    return f"{', '.join(others)}, or {last}" if others else last


def _engines(recipe: Recipe, role: RoleMemory) -> list[Finding]:
    field = f"inference.{role.role}" if role.role in ("prefill", "decode") else "inference"
    if recipe.inference.expert_parallel:
        fix = "more nodes_per_replica (wider EP), or quantization: fp8"
    else:
        fix = "raise parallel.tp, set expert_parallel: true, or quantization: fp8"
    if recipe.colocated:
        fix = f"raise gpu_memory_utilization, or {fix}"
    if role.free_gib <= 0:
        level = "error" if role.needed_gib > role.limit_gib * (1 + MARGIN) else "warning"
        text = f"does not fit: weights {role.parts['weights']:g} and reserve {role.parts['reserve']:g} GiB"
        return [
            _finding(level, field, f"{text} leave no memory for the KV cache in {role.limit_gib:g} GiB per GPU", fix)
        ]
    if role.kv_tokens < recipe.max_len:
        level = "error" if role.kv_tokens < recipe.max_len * (1 - 3 * MARGIN) else "warning"
        text = f"does not fit: the KV cache of a GPU holds {number(role.kv_tokens)} tokens, "
        text += f"but one sequence may have {number(recipe.max_len)}"
        return [_finding(level, field, text, fix)]
    # vLLM allocates kv_cache_bytes even if that exceeds gpu_memory_utilization
    available_gib = role.limit_gib if recipe.colocated else role.gpu_gib
    if sum(role.parts.values()) > available_gib * (1 + MARGIN):
        text = f"does not fit: weights {role.parts['weights']:g}, reserve {role.parts['reserve']:g} and KV cache "
        text += f"{role.parts['KV']:g} GiB, of {available_gib:g} GiB "
        text += "of a GPU that the trainer leaves" if recipe.colocated else "of a GPU"
        fix = "lower it, or raise gpu_memory_utilization" if recipe.colocated else "lower it"
        return [_finding("error", _kv_field(recipe, role), text, fix)]
    return []


def _kv_field(recipe: Recipe, role: RoleMemory) -> str:
    settings = {"prefill": recipe.inference.prefill, "decode": recipe.inference.decode}.get(role.role)
    return (
        f"inference.{role.role}.kv_cache_bytes" if settings and settings.kv_cache_bytes else "inference.kv_cache_bytes"
    )


def _finding(level: str, field: str, text: str, fix: str) -> Finding:
    return Finding(level="error" if level == "error" else "warning", field=field, text=text, fix=fix)


def _host(requests: list[ResourceRequest], estimate: Estimate) -> list[Finding]:
    train = next((role for role in estimate.roles if role.role == "train"), None)
    memory_gib = next((request.kind.memory_gib for request in requests if request.role == "train"), None)
    if train is None or memory_gib is None or train.host_gib_per_node <= memory_gib:
        return []
    what = "offloaded states and activations, and checkpoint copies"
    text = f"does not fit: {what} take {train.host_gib_per_node:g} GiB of a node's {memory_gib:g} GiB of host memory"
    return [Finding(level="error", field="trainer.memory", text=text, fix="use more train nodes")]


def _head(recipe: Recipe, requests: list[ResourceRequest], estimate: Estimate) -> list[Finding]:
    """Check that buffered rollouts fit the head node, in addition to what a trainer there offloads."""
    buffered = next((amount for amount in estimate.amounts if amount.name == BUFFERED), None)
    memory = node_memory(recipe, requests[0]) if requests else None
    if buffered is None or memory is None:
        return []
    offloaded = sum(role.host_gib_per_node for role in estimate.roles if role.role == requests[0].role)
    longest, room = buffered.value * 1e9 / GIB, memory / GIB - offloaded
    if longest <= room:
        return []
    typical, field = longest / TYPICAL, "orchestrator.batch_size"
    fix = f"slurm.{requests[0].role}.mem: {longest + offloaded:.0f}G, a smaller batch_size or max_off_policy_steps"
    of = f"{room:.0f} GiB of the head node's memory"
    if typical > room:
        text = f"does not fit: buffered rollouts of a quarter of seq_len take {typical:.0f} of {of}"
        return [Finding(level="error", field=field, text=text, fix=fix)]
    text = f"may not fit: buffered rollouts of seq_len would take {longest:.0f} of {of}"
    return [Finding(level="note", field=field, text=text, fix=fix)]


def _disk(recipe: Recipe, requests: list[ResourceRequest], estimate: Estimate) -> list[Finding]:
    """Check that local checkpoint copies outside of host memory fit the disk of each train node."""
    copies = next((amount for amount in estimate.amounts if amount.name == LOCAL_COPIES), None)
    train = next((request for request in requests if request.role == "train"), None)
    if copies is None or train is None or in_memory(recipe):
        return []
    field, needed, disk_gib = "checkpoint.local", copies.value * 1e9 / GIB, train.kind.disk_gib
    takes = f"checkpoint copies take {needed:.0f} GiB of each train node's disk"
    if disk_gib is None:
        text = f"may not fit: {takes}, whose size the site file does not give"
        fix = f"set `disk_gib` of the nodes of {train.kind.partition} in the site file"
        return [Finding(level="note", field=field, text=text, fix=fix)]
    if needed <= disk_gib:
        return []
    fix = "more train nodes, checkpoint.moments: bfloat16, or leave checkpoint.local out"
    return [Finding(level="error", field=field, text=f"does not fit: {takes}, which has {disk_gib:g} GiB", fix=fix)]


def _last_checkpoint(recipe: Recipe, site: Site, requests: list[ResourceRequest], estimate: Estimate) -> list[Finding]:
    """Warn if a checkpoint takes longer than the time between Slurm's signal and the end of the job.

    A job that has written a checkpoint knows how long that takes, and stops earlier.
    """
    size = next((amount for amount in estimate.amounts if amount.name == "checkpoint"), None)
    nodes = sum(request.nodes for request in requests if request.role == "train")
    lead, speed = recipe.slurm.checkpoint_signal_s, site.storage_gbytes_per_s
    if size is None or lead is None or size.value <= nodes * speed * lead:
        return []
    seconds = size.value / nodes / speed
    text = f"{lead} s before the time limit is too late for the first checkpoint of a job: {size.value:g} GB from "
    text += f"{nodes} node{'s' * (nodes > 1)} take {duration(seconds)} at {speed:g} GB/s per node "
    text += "(measured, or network.storage_gbytes_per_s of the site file)"
    fix = f"leave it out, or checkpoint_signal_s: {math.ceil(1.5 * seconds / 60) * 60}"
    return [Finding(level="warning", field="slurm.checkpoint_signal_s", text=text, fix=fix)]


def _concurrency(recipe: Recipe, estimate: Estimate) -> list[Finding]:
    """Check that engines which decode can hold the rollouts in flight, at least at a typical length."""
    holders = [role for role in estimate.roles if role.role in ("decode", "inference") and role.typical]
    if recipe.task != "rl" or not holders or recipe.max_inflight <= holders[0].typical:
        return []
    role = holders[0]
    text = f"{recipe.max_inflight} rollouts may be in flight, but the KV cache holds only {number(role.typical)} "
    text += "of a quarter of the longest length"
    if recipe.orchestrator.concurrency == "adaptive":
        text += ". orchestrator.concurrency: adaptive limits them to what fits"
    fix = "lower it, or add nodes"
    if recipe.inference.kv_offload is None:
        fix += ", or set inference.kv_offload, so that rollouts which wait for a tool use no GPU memory"
    return [Finding(level="note", field="orchestrator.max_inflight_rollouts", text=text, fix=fix)]


def _stall(recipe: Recipe, estimate: Estimate) -> list[Finding]:
    """Check the timeout without progress: during a step, all rollouts may wait for its policy."""
    steps = {amount.name: amount for amount in estimate.amounts}
    limit = recipe.orchestrator.stall_timeout_s
    if recipe.task != "rl" or limit is None or LONGEST_STEP not in steps or steps[LONGEST_STEP].value <= limit:
        return []
    # Engines sample during most of a long step, which counts as progress, so only a long typical step is an error.
    is_error = steps[TYPICAL_STEP].value > limit
    step, length = steps[TYPICAL_STEP if is_error else LONGEST_STEP], "a quarter of seq_len" if is_error else "seq_len"
    text = f"a step of {recipe.orchestrator.batch_size} rollouts of {length} takes {duration(step.value)} by the "
    text += "planner's estimate, so the run would end while engines wait for its policy"
    longest = steps[LONGEST_STEP].most or steps[LONGEST_STEP].value
    fix = f"leave it out, set it to at least {math.ceil(1.5 * longest / 60) * 60}, or use more train nodes"
    level: Literal["error", "warning"] = "error" if is_error else "warning"
    return [Finding(level=level, field="orchestrator.stall_timeout_s", value=str(limit), text=text, fix=fix)]


def environment_capacity(recipe: Recipe, requests: list[ResourceRequest]) -> list[Finding]:
    """Return findings for environment nodes that are too small or too many, and for a head node that is too small."""
    workers = sum(environment.workers for environment in recipe.all_environments)
    nodes = recipe.deployment.environments
    findings: list[Finding] = []
    for request in requests:
        if nodes is None and request.role == "control" and workers > request.kind.cpus:
            text = f"{workers} environment workers share the {request.kind.cpus} CPU cores of the head node"
            own_nodes = "set deployment.environments to give them their own nodes"
            fix = own_nodes if recipe.tenant is None else "use fewer workers"
            findings.append(Finding(level="warning", field="environments", text=text, fix=fix))
        elif nodes is not None and request.role == "environments":
            findings += [*_fullest_node(recipe, nodes, request, workers), *_spread(recipe, nodes, workers)]
            findings += _sandboxes(recipe, nodes, _worker_memory(recipe, nodes, request))
    return findings


def _fullest_node(recipe: Recipe, nodes: EnvironmentNodes, request: ResourceRequest, workers: int) -> list[Finding]:
    most = -(-workers // nodes.nodes)
    cores = nodes.cpus or recipe.slurm.environments.cpus_per_task or request.kind.cpus
    findings = []
    if most * nodes.cpus_per_worker > cores:
        needed = f"{most} workers of {nodes.cpus_per_worker:g} CPU cores"
        fix = "more nodes, fewer workers, or a smaller cpus_per_worker"
        findings.append(
            _finding("error", _ENVIRONMENTS, f"does not fit: a node runs {needed}, but has {cores} cores", fix)
        )
    memory = _worker_memory(recipe, nodes, request)
    if memory and most * bytes_of(nodes.memory_per_worker) > memory:
        needed = f"{most} workers of {nodes.memory_per_worker}"
        fix = "more nodes, fewer workers, or a smaller memory_per_worker"
        findings.append(
            _finding("error", _ENVIRONMENTS, f"does not fit: a node runs {needed}, but has {memory / GIB:.0f} GiB", fix)
        )
    return findings


def _worker_memory(recipe: Recipe, nodes: EnvironmentNodes, request: ResourceRequest) -> float:
    """Return the memory of a node that the job gets [bytes]; 0 if unknown."""
    memory = nodes.memory or recipe.slurm.environments.mem or request.kind.mem
    return bytes_of(memory) if memory else (request.kind.memory_gib or 0) * GIB


def _sandboxes(recipe: Recipe, nodes: EnvironmentNodes, memory: float) -> list[Finding]:
    evenly = -(-recipe.max_inflight // nodes.nodes)
    rollouts = min(evenly, nodes.max_rollouts_per_node or evenly)
    ratios = sum(environment.ratio for environment in recipe.environments)
    limits = [environment.ratio / ratios * _sandbox_gb(environment.runtime) for environment in recipe.environments]
    needed = rollouts * sum(limits) * 10**9
    if not memory or needed <= memory:
        return []
    text = (
        f"a node has {memory / GIB:.0f} GiB, but its {rollouts} rollouts may use {needed / GIB:.0f} GiB by their limits"
    )
    fix = "use more nodes, set max_rollouts_per_node, or lower runtime.limits (memory_gb, and disk_gb of subprocess)"
    return [_finding("warning", _ENVIRONMENTS, text, fix)]


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
        findings.append(
            _finding(
                "warning",
                _ENVIRONMENTS,
                f"{workers} workers leave {nodes.nodes - workers} of {nodes.nodes} nodes idle",
                fix,
            )
        )
    bound = (nodes.max_rollouts_per_node or recipe.max_inflight) * nodes.nodes
    if bound < recipe.max_inflight:
        text = (
            f"{nodes.nodes} nodes with {nodes.max_rollouts_per_node} rollouts each run {bound} of {recipe.max_inflight}"
        )
        findings.append(_finding("warning", _ENVIRONMENTS, text, "more nodes, or raise max_rollouts_per_node"))
    return findings
