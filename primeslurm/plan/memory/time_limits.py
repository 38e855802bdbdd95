"""Time limits that depend on the bytes to read: start of engines, and loading of trainer ranks.

Limits that the recipe sets are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from primeslurm.base import units
from primeslurm.models.registry import family_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan.commands.command import ENGINE_ROLES
from primeslurm.plan.commands.engine import START_S, settings_of
from primeslurm.plan.forecast import Quantity
from primeslurm.plan.memory.estimate import STORED_BYTES
from primeslurm.plan.memory.parameters import count
from primeslurm.plan.memory.trainer import STATE_BYTES
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.plan.placement.resources import ResourceRequest, expert_ranks
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.phase_limits import LONG_PHASE_S

# Share of a node's storage bandwidth that is guaranteed while all nodes read
SLOW = 0.1


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
        yield request.gpus // tp * _stored(recipe, shape, min(1.0, tp / spread) if filtered else 1.0)


def _stored(recipe: Recipe, shape: ModelShape | None, share: float) -> float:
    if shape is None:
        return 0.0
    parameters = count(shape)
    element = STORED_BYTES.get(shape.quantization or "", 2 if recipe.model.dtype == "bfloat16" else 4)
    return element * (parameters.total - parameters.experts * (1 - share))
