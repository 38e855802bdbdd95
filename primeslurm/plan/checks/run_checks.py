"""All checks of a recipe on a site and of its plan, and the estimate that some of them use."""

from __future__ import annotations

from primeslurm.models.shape import ModelShape
from primeslurm.plan.checks.capacity import capacity, environment_capacity
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import ModelFiles
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.teacher import teacher_findings
from primeslurm.plan.checks.tool_rendering import tool_rendering
from primeslurm.plan.checks.unsupported import unsupported
from primeslurm.plan.estimates.estimate import estimate
from primeslurm.plan.forecast import Estimate
from primeslurm.plan.gpus import GPUS, gpu_of
from primeslurm.plan.model import Finding, Plan
from primeslurm.plan.placement.fixed_port_checks import port_warnings
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.rules.environments import rule_of


def check_run(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], model: ModelFiles, teacher: ModelFiles | None
) -> tuple[list[Finding], Estimate | None]:
    """Return all findings about a recipe, and the estimate if the model's shape is known.

    `requests` is empty if the recipe cannot be placed.
    """
    findings = conflicts(RuleContext(recipe, site, requests, model.shape))
    findings += unsupported(recipe, model.shape, model.model_type) + tool_rendering(recipe, model.model_type)
    findings += _unread_parsers(recipe)
    if model.absent:
        findings.append(model.absent)
    of_teacher, memory = teacher_findings(recipe, site, requests, teacher)
    findings += of_teacher + environment_capacity(recipe, requests)
    if recipe.tenant is not None:  # the deployment has the memory that would be estimated
        return findings, None
    if model.shape is None:
        return findings + _no_estimate(recipe, site, model), None
    worked_out = estimate(recipe, site, requests, model.shape, model.source)
    findings += (
        capacity(recipe, site, requests, worked_out)
        + _unknown_gpus(site, requests)
        + _vision_not_estimated(recipe, model.shape)
    )
    roles = (*worked_out.roles, *([memory] if memory else []))
    return findings, worked_out.model_copy(update={"roles": roles})


def check_plan(recipe: Recipe, plan: Plan) -> tuple[Finding, ...]:
    """Return advice on a recipe that can run but may not run well."""
    findings: list[Finding] = []
    orchestrator = recipe.orchestrator
    if recipe.task == "rl" and recipe.tenant is None:
        per_engine = recipe.max_inflight / max(plan.totals.engines, 1)
        router = recipe.inference.router
        hashed = router.type == "vllm-router" and router.policy == "consistent_hash"
        if hashed and per_engine < 4:
            text = (
                f"consistent hashing spreads {recipe.max_inflight} rollouts unevenly over {plan.totals.engines} engines"
            )
            findings.append(Finding(level="warning", field="inference.router.policy", text=text, fix="use round_robin"))
        lead = recipe.max_inflight / orchestrator.batch_size
        if lead > orchestrator.max_off_policy_steps + 1:
            bound = orchestrator.max_off_policy_steps
            text = f"{lead:.1f} batches are in flight, but rollouts older than {bound} steps are dropped"
            fix = "lower it, or raise orchestrator.max_off_policy_steps"
            findings.append(Finding(level="warning", field="orchestrator.max_inflight_rollouts", text=text, fix=fix))
        findings += _single_rollout_groups(recipe)
    findings += _colocated(recipe, plan) + _few_cores(plan) + port_warnings(recipe, plan)
    single = [group.name for group in plan.groups if group.nodes == 1]
    if single and any(group.spares or group.name == "environments" for group in plan.groups):
        text = f"component {', '.join(single)} has one node, so Slurm requeues the whole job if any node is lost"
        fix = "give it a spare, or use layout: single"
        findings.append(Finding(level="warning", field="deployment.spares", text=text, fix=fix))
    if recipe.checkpoint.interval > recipe.max_steps:
        text = f"only the last step ({recipe.max_steps}) is saved, so a failed run restarts from the beginning"
        findings.append(Finding(level="warning", field="checkpoint.interval", text=text))
    if recipe.checkpoint.local and not recipe.deployment.spares.train:
        text = "the copies are never read: ranks restart within an attempt only if a spare replaces a node"
        findings.append(Finding(level="warning", field="checkpoint.local", text=text, fix="deployment.spares.train: 1"))
    return tuple(findings)


def _colocated(recipe: Recipe, plan: Plan) -> list[Finding]:
    """Note which GPUs and memory trainer and engines share, and what the restart of an engine needs."""
    if not recipe.colocated:
        return []
    gpus = sorted({gpu for process in plan.processes() if process.role == "trainer" for gpu in process.gpus})
    which = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
    share = recipe.trainer_memory_share
    text = f"trainer and engines share {which}: {1 - share:.0%} of the memory is for engines and {share:.0%} for the "
    text += "trainer. The trainer starts after the engines. They compute in turns, so steps take longer than "
    text += "estimated."
    findings = [Finding(level="note", field="inference.gpu_memory_utilization", text=text)]
    if plan.device == "cuda" and recipe.inference.kv_cache_bytes is None:
        text = "cannot be derived from the model and the GPU type, so each engine measures it when it starts. An "
        text += "engine that restarts while the trainer computes may measure too much or too little."
        findings.append(Finding(level="warning", field="inference.kv_cache_bytes", text=text, fix="set it"))
    return findings


def _few_cores(plan: Plan) -> list[Finding]:
    """Warn if a Slurm step has too few cores for its GPU processes. `srun` gives it one core by default."""
    processes = sum(bool(process.gpus) for process in plan.processes())
    cores = max(group.cpus_per_task for group in plan.groups)
    if plan.executor != "local" or plan.device != "cuda" or cores >= processes:
        return []
    text = f"{processes} processes that use GPUs share {cores} CPU core{'s' if cores > 1 else ''}"
    fix = "inside an allocation, start it with srun --cpus-per-task=N"
    return [Finding(level="warning", field="--local", text=text, fix=fix)]


def _single_rollout_groups(recipe: Recipe) -> list[Finding]:
    """Warn of groups of one rollout if the advantage compares the rollouts of a group."""
    findings = []
    for environment in recipe.environments:
        rule = rule_of(recipe, environment)
        if rule in ("grpo", "max_rl") and recipe.group_size(environment) == 1:
            text = f"advantages: {rule} compares the rollouts of a group, so a single rollout has advantage 0"
            fix = f"use at least 2, usually 8, for {environment.label}"
            findings.append(Finding(level="warning", field="orchestrator.group_size", value="1", text=text, fix=fix))
    return findings


def _unread_parsers(recipe: Recipe) -> list[Finding]:
    if recipe.task != "rl":
        return []
    text = "has no effect in RL: the renderer parses tool calls and reasoning from token ids"
    fix = "remove it, and set model.renderer or model.renderer_options if needed"
    named = (name for name in ("tool_call_parser", "reasoning_parser") if getattr(recipe.inference, name))
    return [Finding(level="note", field=f"inference.{name}", text=text, fix=fix) for name in named]


def _no_estimate(recipe: Recipe, site: Site, model: ModelFiles) -> list[Finding]:
    if site.device == "cpu" or model.absent is None:
        return []
    text = "memory is not estimated: the model is neither on this machine nor in the catalog"
    return [Finding(level="note", field="model.path", value=recipe.model.path, text=text)]


def _vision_not_estimated(recipe: Recipe, shape: ModelShape) -> list[Finding]:
    if recipe.model.vlm is None or not shape.has_vision or shape.vision is not None:
        return []
    text = "memory of the vision encoder is not estimated: its size is only known for the trainer's own model families"
    return [Finding(level="note", field="model.vlm", text=text)]


def _unknown_gpus(site: Site, requests: list[ResourceRequest]) -> list[Finding]:
    partitions = sorted(
        {request.kind.partition for request in requests if request.gpus and gpu_of(request.kind) is None}
    )
    if site.device == "cpu" or not partitions:
        return []
    text = f"memory is not estimated: the GPU type of partition {', '.join(partitions)} is unknown"
    fix = f"set `gpu` of its nodes in the site file to one of {', '.join(GPUS)}"
    return [Finding(level="note", field="site", text=text, fix=fix)]
