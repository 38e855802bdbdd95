"""Time limits that a recipe may leave open: they follow from the plan's own estimates, with a margin. Pure.

A limit that the recipe sets is kept, and refused if the work it limits takes longer by the estimate. Without an
estimate, for example because the model's shape is unknown, the least value holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from primeslurm.base import units
from primeslurm.models.registry import family_of
from primeslurm.models.shape import ModelShape
from primeslurm.plan.commands.command import ENGINE_ROLES
from primeslurm.plan.commands.engine import settings_of
from primeslurm.plan.commands.engine_defaults import START_S
from primeslurm.plan.estimates.estimate import LONGEST_STEP, MICRO_BATCH, SAMPLED, STORED_BYTES, TOKEN
from primeslurm.plan.estimates.parameters import count
from primeslurm.plan.estimates.trainer_memory import STATE_BYTES
from primeslurm.plan.forecast import Estimate, Quantity
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.plan.placement.resources import ResourceRequest, expert_ranks
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.fields.types import minutes
from primeslurm.recipe.phase_limits import LONG_PHASE_S
from primeslurm.recipe.sections.orchestrator import REQUEST_S, STALL_S
from primeslurm.recipe.sections.slurm import CHECKPOINT_SIGNAL_S, DEFAULT_TIME
from primeslurm.recipe.sections.trainer import BATCH_WAIT_S, RANK_HANG_S, WEIGHT_LOAD_S

# All nodes read and send at once, and each may get a tenth of its rate. Rates of rollouts are predicted to an order of
# magnitude.
SLOW = 10.0
# Steps and checkpoints, whose times are predicted within 12 %, and network traffic that was never measured
USUAL = 1.5
# A single turn of a rollout, beside others that make the engine slower than the mean
TURN = 3.0


@dataclass(frozen=True)
class _Limit:
    """One time limit, and the work it limits."""

    field: str  # section and field of the recipe
    name: str
    least: int  # [s]
    work: str
    seconds: float  # estimated time of the work; 0: unknown
    margin: float
    added: bool = False  # the margin comes on top of `least`, which is for other work
    level: Literal["error", "warning", "none"] = "error"  # of a limit below the estimate
    most: float = math.inf

    @property
    def value(self) -> int:
        """Return the limit in whole minutes, or the least value [s]."""
        needed = 60 * math.ceil(self.margin * self.seconds / 60)
        return int(min(self.least + needed if self.added else max(self.least, needed), max(self.least, self.most)))

    def quantity(self, given: int | None) -> Quantity:
        if given is not None:
            return Quantity(name=self.name, value=given, unit="s", how="time limit set by the recipe")
        if not self.seconds:
            how = f"time limit: {units.duration(self.least)}, because the model's shape is unknown"
            return Quantity(name=self.name, value=self.least, unit="s", how=how)
        margin = f"{self.margin:g} x the {units.duration(self.seconds)} of {self.work}"
        least = units.duration(self.least)
        how = f"{least}, plus {margin}" if self.added else f"{margin}, at least {least}"
        return Quantity(name=self.name, value=self.value, unit="s", how=f"time limit: {how}")

    def finding(self, given: int) -> Finding | None:
        if self.level == "none" or given >= self.seconds:
            return None
        text = f"{self.work} takes {units.duration(self.seconds)} by the planner's estimate, so it would never complete"
        fix = f"leave it out, which sets {self.value}"
        return Finding(level=self.level, field=self.field, value=str(given), text=text, fix=fix)


def with_limits(
    recipe: Recipe,
    site: Site,
    requests: list[ResourceRequest],
    shape: ModelShape | None,
    teacher: ModelShape | None,
    estimate: Estimate | None = None,
) -> tuple[Recipe, list[Quantity], list[Finding]]:
    """Return the recipe with its open limits filled in, each limit as a quantity, and findings about limits it sets."""
    amounts = {amount.name: amount for amount in estimate.amounts} if estimate else {}
    limits = [*_reading(recipe, site, requests, shape, teacher), *_of_run(recipe, site, requests, amounts)]
    quantities, findings = [], []
    update: dict[str, dict[str, int]] = {}
    for limit in limits:
        section, field = limit.field.split(".")
        given = getattr(getattr(recipe, section), field)
        quantities.append(limit.quantity(given))
        if given is None:
            update.setdefault(section, {})[field] = limit.value
        elif finding := limit.finding(given):
            findings.append(finding)
    sections = {name: getattr(recipe, name).model_copy(update=fields) for name, fields in update.items()}
    return recipe.model_copy(update=sections), quantities, findings


def _reading(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], shape: ModelShape | None, teacher: ModelShape | None
) -> Iterator[_Limit]:
    """Yield the limits of starts. A model of unknown shape adds no time."""
    engine_requests = [request for request in requests if request.role in ENGINE_ROLES or request.role == "teacher"]
    speed = site.storage_gbytes_per_s * 1e9

    def reading(size: float) -> str:
        return f"reading {units.size(size)} per node at {site.storage_gbytes_per_s:g} GB/s"

    if engine_requests:
        size = max(_read(recipe, engine_requests, shape, teacher))
        field = "inference.start_timeout_s"
        yield _Limit(field, "engine start", START_S, reading(size), size / speed, SLOW, added=True)
    train = next((request for request in requests if request.role == "train"), None)
    if train:
        copies = recipe.trainer.parallelism.dp_replicate  # each reads the model once
        state = (4 + STATE_BYTES[recipe.trainer.optimizer.type]) * count(shape).total if shape else 0
        size = (copies * _stored(recipe, shape, 1.0) + state) / train.nodes
        field = "trainer.long_phase_timeout_s"
        yield _Limit(field, "trainer loading", LONG_PHASE_S, reading(size), size / speed, SLOW, added=True)


def _of_run(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], amounts: Mapping[str, Quantity]
) -> Iterator[_Limit]:
    """Yield the limits of a run's work, as far as the work is estimated."""
    nodes = sum(request.nodes for request in requests if request.role == "train")
    if "checkpoint" in amounts and nodes:
        seconds = amounts["checkpoint"].value / nodes / site.storage_gbytes_per_s
        submission = recipe.slurm.over(site.slurm)
        # At most half of the job is kept for its last checkpoint.
        most = min(60 * minutes(submission.time_min or submission.time or DEFAULT_TIME) / 2, 65535)
        field, work = "slurm.checkpoint_signal_s", "writing a checkpoint"
        yield _Limit(field, "checkpoint signal", CHECKPOINT_SIGNAL_S, work, seconds, USUAL, level="none", most=most)
    if MICRO_BATCH in amounts:
        seconds, work = amounts[MICRO_BATCH].value, "a micro batch and the optimizer's update"
        yield _Limit("trainer.hang_timeout_s", "progress of a rank", RANK_HANG_S, work, seconds, USUAL)
    if recipe.task != "rl":
        return
    if "weight update" in amounts:
        seconds, work = amounts["weight update"].value, "a weight update"
        yield _Limit("weights.timeout_s", "weight loading", WEIGHT_LOAD_S, work, seconds, SLOW)
    if LONGEST_STEP in amounts:
        step = amounts[LONGEST_STEP]
        seconds, work = step.most or step.value, "a step of rollouts of seq_len"
        # `checks.capacity` reports a limit below the estimate.
        yield _Limit("orchestrator.stall_timeout_s", "stall", STALL_S, work, seconds, USUAL, level="none")
    if TOKEN in amounts and SAMPLED in amounts:
        turn = recipe.orchestrator.sampling.max_tokens or recipe.seq_len
        seconds, work = turn * amounts[TOKEN].value / 1e3, f"a turn of {units.tokens(turn)} tokens"
        yield _Limit(
            "orchestrator.request_timeout_s", "generation request", REQUEST_S, work, seconds, TURN, level="warning"
        )
        rate = max(amounts[SAMPLED].value, 1.0)  # rounded, so it may be 0
        seconds = recipe.orchestrator.batch_size * recipe.seq_len / rate
        work = "sampling a batch of seq_len"
        yield _Limit("trainer.batch_timeout_s", "wait for a batch", BATCH_WAIT_S, work, seconds, SLOW, level="none")


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
