"""Compare the memory estimate with the memory of GPUs, hosts and disks."""

from __future__ import annotations

from primeslurm.base.units import number
from primeslurm.plan.batch_job import node_memory
from primeslurm.plan.forecast import Estimate, RoleMemory
from primeslurm.plan.gpus import GIB
from primeslurm.plan.memory.checkpoint_size import LOCAL_COPIES, in_memory
from primeslurm.plan.memory.estimate import TYPICAL
from primeslurm.plan.memory.orchestrator_memory import BUFFERED
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe

# Error of the memory model. Within this share of the limit, the check warns instead of refusing.
MARGIN = 0.1


def capacity(recipe: Recipe, requests: list[ResourceRequest], estimate: Estimate) -> list[Finding]:
    """Return findings for roles that do not, or may not, fit their GPUs, hosts or disks."""
    findings: list[Finding] = []
    for role in estimate.roles:
        findings += _trainer(recipe, role) if role.role == "train" else _engines(recipe, role)
    findings += _host(requests, estimate) + _head(recipe, requests, estimate) + _disk(recipe, requests, estimate)
    return findings + _concurrency(recipe, estimate)


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
