"""Fields that a recipe may leave open and the planner fills in: compilation, weight transport, sizes, time limits.

The start of engines and the loading of trainer ranks get limits that depend on the bytes to read. Limits that the
recipe sets are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from primeslurm.base import units
from primeslurm.models.registry import family_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan import lora_engines
from primeslurm.plan.commands.command import ENGINE_ROLES
from primeslurm.plan.commands.engine import settings_of
from primeslurm.plan.commands.engine_defaults import START_S
from primeslurm.plan.forecast import Estimate, Quantity
from primeslurm.plan.memory.estimate import STORED_BYTES
from primeslurm.plan.memory.parameters import count
from primeslurm.plan.memory.trainer import STATE_BYTES
from primeslurm.plan.model import WeightTransport
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.plan.placement.resources import ResourceRequest, expert_ranks
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.phase_limits import LONG_PHASE_S

# Share of a node's storage bandwidth that is guaranteed while all nodes read
SLOW = 0.1


def resolve_auto_fields(recipe: Recipe, model_type: str | None, device: str, shape: ModelShape | None = None) -> Recipe:
    """Return the recipe with `trainer.compile`, `trainer.lora.engines` and `weights.transport` filled in if open.

    Args:
        model_type: `model_type` of the model's config.json; None if it is unknown.
        device: device of the trainer ranks and engines, "cuda" or "cpu".
    """
    transport = choose_transport(recipe, device).transport
    trainer = recipe.trainer
    if trainer.compile is None:
        trainer = trainer.model_copy(update={"compile": _compiles(recipe, model_type, device)})
    trainer = trainer.model_copy(update={"lora": lora_engines.resolved(recipe, shape)})
    weights = recipe.weights.model_copy(update={"transport": transport})
    return recipe.model_copy(update={"trainer": trainer, "weights": weights})


def choose_transport(recipe: Recipe, device: str, shape: ModelShape | None = None) -> WeightTransport:
    """Return the transport of new weights, and the reason. `device` is as in `resolve_auto_fields`."""
    transport, about_adapter = _transport(recipe, device), lora_engines.reason(recipe, shape)
    if about_adapter:
        transport = transport.model_copy(update={"reason": f"{transport.reason}; {about_adapter}"})
    return transport


def _transport(recipe: Recipe, device: str) -> WeightTransport:
    if recipe.weights.transport != "auto":
        return WeightTransport(transport=recipe.weights.transport, reason="set by the recipe")
    reasons_for_files = {
        f"task {recipe.task} updates no engines": recipe.task != "rl",
        "trainer and engines use no GPUs": device != "cuda",
        "trainer and engines share GPUs": recipe.colocated,
        "the run trains LoRA adapters": recipe.trainer.lora is not None,
        "weights.keep asks for published policies": "keep" in recipe.weights.model_fields_set,
        "weights.deltas publishes policies": recipe.weights.deltas,
        "batch-invariant engines use other NCCL settings": recipe.inference.batch_invariant,
    }
    reason = next((reason for reason, applies in reasons_for_files.items() if applies), None)
    if reason is not None:
        return WeightTransport(transport="filesystem", reason=reason)
    return WeightTransport(transport="nccl", reason="trainer and engines have separate GPUs")


def _compiles(recipe: Recipe, model_type: str | None, device: str) -> bool:
    """Whether compiled layers have been tested with every training mode that the recipe uses."""
    trainer = recipe.trainer
    if device != "cuda" or recipe.tenant is not None:
        return False
    if recipe.model.dtype != "bfloat16" or trainer.parallelism.ep_backend == "deepep":
        return False
    if model_type is None or recipe.model.impl == "hf" or recipe.model.vlm is not None:
        return False
    family = family_of(model_type)
    tested_modes = family.model_types[model_type].compiled_with if family else None
    cp_style = trainer.parallelism.cp_style if trainer.parallelism.cp > 1 else None
    modes = {
        "fp8": trainer.fp8,
        "lora": trainer.lora,
        "router_replay": trainer.router_replay,
        "cp": cp_style == "ulysses",
        "all-gathered cp": cp_style == "allgather",
        "one expert after the other": not trainer.grouped_mm,
    }
    return tested_modes is not None and {mode for mode, used in modes.items() if used} <= tested_modes


def with_kv_cache_size(recipe: Recipe, estimate: Estimate | None) -> Recipe:
    """Return the recipe with the KV cache size of engines that share GPUs with the trainer, if the estimate has one."""
    # Without a size, vLLM measures how much memory of the whole GPU disappears while it profiles. An engine that
    # restarts beside a working trainer would count the trainer's memory as its own.
    role = next((role for role in estimate.roles if role.role == "inference"), None) if estimate else None
    if not recipe.colocated or recipe.inference.kv_cache_bytes or role is None or not role.kv_tokens:
        return recipe
    size = role.kv_tokens * role.kv_bytes_per_token
    return recipe.model_copy(update={"inference": recipe.inference.model_copy(update={"kv_cache_bytes": size})})


def with_limits(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape | None, teacher: ModelShape | None
) -> tuple[Recipe, list[Quantity]]:
    """Return the recipe with its open limits filled in, and each limit as a quantity."""
    # A model of unknown shape adds no time.
    engines = _engine_start(recipe, site, requests, shape, teacher)
    ranks = _trainer_loading(recipe, site, requests, shape)
    update: dict[str, object] = {}
    if engines:
        update["inference"] = recipe.inference.model_copy(update={"start_timeout_s": int(engines.value)})
    if ranks:
        update["trainer"] = recipe.trainer.model_copy(update={"long_phase_timeout_s": int(ranks.value)})
    return recipe.model_copy(update=update), [limit for limit in (engines, ranks) if limit]


def _engine_start(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape | None, teacher: ModelShape | None
) -> Quantity | None:
    engine_requests = [request for request in requests if request.role in ENGINE_ROLES or request.role == "teacher"]
    if not engine_requests:
        return None
    size = max(_read(recipe, engine_requests, shape, teacher))
    return _limit("engine start", recipe.inference.start_timeout_s, START_S, size, site)


def _trainer_loading(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape | None
) -> Quantity | None:
    train = next((request for request in requests if request.role == "train"), None)
    if train is None:
        return None
    copies = recipe.trainer.parallelism.dp_replicate  # each reads the model once
    state = (4 + STATE_BYTES[recipe.trainer.optimizer.type]) * count(shape).total if shape else 0
    size = (copies * _stored(recipe, shape, 1.0) + state) / train.nodes
    return _limit("trainer loading", recipe.trainer.long_phase_timeout_s, LONG_PHASE_S, size, site)


def _limit(name: str, given: int | None, base: int, size: float, site: Site) -> Quantity:
    if given is not None:
        return Quantity(name=name, value=given, unit="s", how="time limit set by the recipe")
    speed = SLOW * site.network.storage_gbytes_per_s * 1e9
    how = f"time limit: {units.duration(base)}, plus {units.size(size)} per node at {speed / 1e9:g} GB/s"
    return Quantity(name=name, value=base + 60 * math.ceil(size / speed / 60), unit="s", how=how)


def _read(
    recipe: Recipe, requests: list[ResourceRequest], shape: ModelShape | None, teacher: ModelShape | None
) -> Iterator[float]:
    """Yield the bytes that the engines of one node read, for each role."""
    for request in requests:
        if request.role == "teacher":
            serving = teacher_recipe(recipe)
            yield request.gpus // serving.inference.parallel.tp * _stored(serving, teacher, 1.0) if serving else 0.0
            continue
        tp, spread = recipe.inference.parallel.tp, expert_ranks(recipe, request)
        family = family_of(shape.model_type) if shape else None
        stacked = family is not None and family.traits.expert_stacks  # vLLM reads stacks of experts as a whole
        # With EPLB an engine may get any expert, and reads all of them.
        filtered = not stacked and not settings_of(recipe, ENGINE_ROLES[request.role]).eplb
        fp8 = recipe.inference.model is not None
        yield request.gpus // tp * _stored(recipe, shape, min(1.0, tp / spread) if filtered else 1.0, fp8=fp8)


def _stored(recipe: Recipe, shape: ModelShape | None, share: float, *, fp8: bool = False) -> float:
    if shape is None:
        return 0.0
    parameters = count(shape)
    element = STORED_BYTES.get("fp8" if fp8 else shape.quantization or "", 2 if recipe.model.dtype == "bfloat16" else 4)
    return element * (parameters.total - parameters.experts * (1 - share))
