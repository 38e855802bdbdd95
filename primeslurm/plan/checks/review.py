"""All findings about a recipe on a site and its plan, and the estimate that some of them rest on."""

from __future__ import annotations

from primeslurm.models.shape import ModelShape
from primeslurm.plan.checks.capacity import capacity
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.environment_capacity import environment_capacity
from primeslurm.plan.checks.files import ModelFiles
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.teacher import review_teacher
from primeslurm.plan.checks.tool_rendering import tool_rendering
from primeslurm.plan.checks.unsupported import unsupported
from primeslurm.plan.memory.estimate import estimate
from primeslurm.plan.memory.forecast import Estimate
from primeslurm.plan.memory.gpus import GPUS, gpu_of
from primeslurm.plan.model import Finding, Plan
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.rules.environments import rule_of


def review(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], model: ModelFiles, teacher: ModelFiles | None
) -> tuple[list[Finding], Estimate | None]:
    """Say what is wrong or doubtful; and estimate memory and amounts, if the model's shape is known.

    Args:
        recipe: what is asked for.
        site: where it is to run.
        requests: what each role gets; empty if the recipe cannot be placed.
        model: what is known of the policy's model.
        teacher: what is known of the teacher's model, if the run serves one.
    """
    found = conflicts(RuleContext(recipe, site, requests, model.shape))
    found += unsupported(recipe, model.shape, model.model_type) + tool_rendering(recipe, model.model_type)
    found += _unread_parsers(recipe)
    if model.absent:
        found.append(model.absent)
    of_teacher, memory = review_teacher(recipe, site, requests, teacher)
    found += of_teacher + environment_capacity(recipe, requests)
    if model.shape is None:
        return found + _no_estimate(recipe, site, model), None
    worked_out = estimate(recipe, site, requests, model.shape, model.source)
    found += capacity(recipe, requests, worked_out) + _unknown_gpus(site, requests) + _uncounted(recipe, model.shape)
    roles = (*worked_out.roles, *([memory] if memory else []))
    return found, worked_out.model_copy(update={"roles": roles})


def advise(recipe: Recipe, plan: Plan) -> tuple[Finding, ...]:
    """Advise on a recipe that can run but may not run well."""
    found: list[Finding] = []
    orchestrator = recipe.orchestrator
    if recipe.task == "rl":
        per_engine = recipe.max_inflight / max(plan.totals.engines, 1)
        router = recipe.inference.router
        hashed = router.type == "vllm-router" and router.policy == "consistent_hash"
        if hashed and per_engine < 4:
            text = f"{recipe.max_inflight} rollouts over {plan.totals.engines} engines fill a hash ring unevenly"
            found.append(Finding(level="warning", field="inference.router.policy", text=text, fix="use round_robin"))
        lead = recipe.max_inflight / orchestrator.batch_size
        if lead > orchestrator.max_off_policy_steps + 1:
            bound = orchestrator.max_off_policy_steps
            text = f"{lead:.1f} batches in flight, but rollouts older than {bound} steps are dropped"
            fix = "lower it, or raise orchestrator.max_off_policy_steps"
            found.append(Finding(level="warning", field="orchestrator.max_inflight_rollouts", text=text, fix=fix))
        found += _alone(recipe)
    found += _colocated(recipe, plan) + _few_cores(plan)
    single = [group.name for group in plan.groups if group.nodes == 1]
    if single and any(group.spares or group.name == "environments" for group in plan.groups):
        text = f"component {', '.join(single)} has one node: Slurm then requeues the whole job when any node is lost"
        fix = "give it a spare, or use layout: single"
        found.append(Finding(level="warning", field="deployment.spares", text=text, fix=fix))
    if recipe.checkpoint.interval > recipe.max_steps:
        text = f"only the last step ({recipe.max_steps}) is saved: a failure before it starts from the beginning"
        found.append(Finding(level="warning", field="checkpoint.interval", text=text))
    if recipe.checkpoint.local and not recipe.deployment.spares.train:
        text = "nothing is read from it: ranks start again within an attempt only where a spare replaces a node"
        found.append(Finding(level="warning", field="checkpoint.local", text=text, fix="deployment.spares.train: 1"))
    return tuple(found)


def _colocated(recipe: Recipe, plan: Plan) -> list[Finding]:
    """Say what trainer and engines share, and what an engine's restart needs."""
    if not recipe.colocated:
        return []
    gpus = sorted({gpu for process in plan.processes() if process.role == "trainer" for gpu in process.gpus})
    which = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
    share = recipe.trainer_memory_share
    text = f"trainer and engines share {which}: {1 - share:.0%} of the memory is for engines and {share:.0%} for the "
    text += "trainer. The trainer starts after the engines. They take turns to compute, so steps take longer than "
    text += "estimated."
    found = [Finding(level="note", field="inference.gpu_memory_utilization", text=text)]
    if plan.device == "cuda" and recipe.inference.kv_cache_bytes is None:
        text = "is not known from the model and the type of the GPUs, so each engine measures it when it starts. An "
        text += "engine that restarts while the trainer computes may measure too much or too little."
        found.append(Finding(level="warning", field="inference.kv_cache_bytes", text=text, fix="set it"))
    return found


def _few_cores(plan: Plan) -> list[Finding]:
    """Warn of a step of Slurm that has one core, as `srun` gives it if it is not asked for more."""
    processes = sum(bool(process.gpus) for process in plan.processes())
    cores = max(group.cpus_per_task for group in plan.groups)
    if plan.executor != "local" or plan.device != "cuda" or cores >= processes:
        return []
    text = f"{processes} processes that use GPUs share {cores} CPU core{'s' if cores > 1 else ''}"
    fix = "inside an allocation, start it with srun --cpus-per-task=N"
    return [Finding(level="warning", field="--local", text=text, fix=fix)]


def _alone(recipe: Recipe) -> list[Finding]:
    """Warn of groups of one rollout whose advantages compare the rollouts of a group."""
    found = []
    for environment in recipe.environments:
        rule = rule_of(recipe, environment)
        if rule in ("grpo", "max_rl") and recipe.group_size(environment) == 1:
            text = f"advantages: {rule} compares the rollouts of a group: one rollout alone has advantage 0"
            fix = f"at least 2, usually 8, for {environment.label}"
            found.append(Finding(level="warning", field="orchestrator.group_size", value="1", text=text, fix=fix))
    return found


def _unread_parsers(recipe: Recipe) -> list[Finding]:
    if recipe.task != "rl":
        return []
    text = "no rollout is read by it: rollouts are token ids, whose tool calls and thoughts the renderer reads"
    fix = "leave it out; model.renderer and model.renderer_options say how they are read"
    named = (name for name in ("tool_call_parser", "reasoning_parser") if getattr(recipe.inference, name))
    return [Finding(level="note", field=f"inference.{name}", text=text, fix=fix) for name in named]


def _no_estimate(recipe: Recipe, site: Site, model: ModelFiles) -> list[Finding]:
    if site.device == "cpu" or model.absent is None:
        return []
    text = "memory is not estimated: the model is not on this machine, and its shape is not known"
    return [Finding(level="note", field="model.path", value=recipe.model.path, text=text)]


def _uncounted(recipe: Recipe, shape: ModelShape) -> list[Finding]:
    if recipe.model.vlm is None or not shape.has_vision or shape.vision is not None:
        return []
    text = "memory of the encoder of images is not estimated: its sizes are known of the trainer's own families alone"
    return [Finding(level="note", field="model.vlm", text=text)]


def _unknown_gpus(site: Site, requests: list[ResourceRequest]) -> list[Finding]:
    partitions = sorted(
        {request.kind.partition for request in requests if request.gpus and gpu_of(request.kind) is None}
    )
    if site.device == "cpu" or not partitions:
        return []
    text = f"no memory estimate: the type of the GPUs in {', '.join(partitions)} is not known"
    fix = f"give their nodes `gpu`, one of {', '.join(GPUS)}, in the site file"
    return [Finding(level="note", field="site", text=text, fix=fix)]
