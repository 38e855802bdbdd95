"""All rules of a recipe, and the rules that belong to no single section."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.models.renderers import AUTO, RENDERERS, is_import_path, nearest_renderer
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.rules import (
    engine_options,
    environments,
    evaluation,
    sampling,
    sandboxes,
    speculation,
    tenant,
    tenant_deployment,
)
from primeslurm.recipe.sections.deployment import Disaggregated
from primeslurm.recipe.sections.losses import CustomLoss
from primeslurm.recipe.sections.orchestrator import AnyEnvironment, Orchestrator
from primeslurm.recipe.sections.slurm import Component, Slurm
from primeslurm.recipe.sections.teacher import PolicyTeacher

# Roles with their own Slurm options.
ROLES = tuple(name for name, info in Slurm.model_fields.items() if info.annotation is Component)
_ADD_TEACHER = "add `teacher: {type: engines, path: ...}`"


def violations(recipe: Recipe) -> list[Violation]:
    """Return everything in the recipe that contradicts another part of the recipe."""
    of_task = {"rl": _rl, "sft": _sft, "serve": _serve, "tenants": tenant_deployment.violations}.get(recipe.task)
    problems = of_task(recipe) if of_task else []
    problems += _colocated(recipe) + _teacher(recipe) + _environment_nodes(recipe) + _renderer(recipe.model.renderer)
    problems += _component_options(recipe) + evaluation.violations(recipe) + engine_options.violations(recipe)
    problems += sandboxes.tunnel_violations(_environments_by_field(recipe)) + speculation.violations(recipe)
    if recipe.tenants is not None and recipe.task != "tenants":
        problems.append(Violation("tenants", "", f"task {recipe.task} has no tenants", "use task: tenants"))
    problems += tenant.violations(recipe)
    max_len = recipe.model.max_len
    if max_len is not None and max_len < recipe.seq_len:
        problems.append(Violation("model.max_len", str(max_len), f"is shorter than seq_len = {recipe.seq_len}"))
    return problems


def _renderer(name: str) -> list[Violation]:
    if name in (AUTO, *RENDERERS) or is_import_path(name):
        return []
    why = f"is not a renderer: use {', '.join((AUTO, *RENDERERS))}, or your own as module:Class"
    return [Violation("model.renderer", name, why, f"nearest: {nearest_renderer(name)}")]


def _environments_by_field(recipe: Recipe) -> dict[str, AnyEnvironment]:
    trained = {f"environments.{index}": each for index, each in enumerate(recipe.trained_environments)}
    evaluated = enumerate(recipe.evaluation_environments)
    return trained | {f"evaluation.environments.{index}": each for index, each in evaluated}


def _rl(recipe: Recipe) -> list[Violation]:
    orchestrator = recipe.orchestrator
    problems: list[Violation] = []
    if not recipe.environments:
        fix = "add `environments: [{id: reverse-text}]`"
        problems.append(Violation("environments", "", "task rl needs at least one", fix))
    for label in environments.repeated([environment.label for environment in recipe.environments]):
        problems.append(Violation("environments", label, "names must be unique", "give each a `name`"))
    problems += environments.violations(recipe) + sandboxes.violations(recipe.environments)
    problems += sampling.violations(recipe) + _algorithm(orchestrator)
    max_tokens = orchestrator.sampling.max_tokens
    if max_tokens is not None and max_tokens >= recipe.seq_len:
        why = f"leaves no room for a prompt in seq_len = {recipe.seq_len}"
        problems.append(Violation("orchestrator.sampling.max_tokens", str(max_tokens), why))
    for name in environments.repeated([name.lower() for name in orchestrator.extra_headers_from_state]):
        why = "the same header twice: upper and lower case do not count"
        problems.append(Violation("orchestrator.extra_headers_from_state", name, why, "leave one out"))
    return problems


def _algorithm(orchestrator: Orchestrator) -> list[Violation]:
    """Return options of advantages that a custom algorithm does not read."""
    if orchestrator.algorithm is None:
        return []
    why = f"orchestrator.algorithm = {orchestrator.algorithm.function} computes the advantages"
    unused: dict[str, str] = {}
    if orchestrator.advantages != "grpo":
        unused["advantages"] = orchestrator.advantages
    if orchestrator.opd_reward:
        unused["opd_reward"] = f"{orchestrator.opd_reward:g}"
    return [Violation(f"orchestrator.{name}", value, why, "leave one out") for name, value in unused.items()]


def _serve(recipe: Recipe) -> list[Violation]:
    if recipe.environments:
        labels = ", ".join(environment.label for environment in recipe.environments)
        return [Violation("environments", labels, "task serve runs none", "leave them out, or use task: rl")]
    return []


def _sft(recipe: Recipe) -> list[Violation]:
    if recipe.sft is None:
        return [Violation("sft", "", "task sft needs this section", "add `sft: {data: {type: jsonl, path: ...}}`")]
    return []


def _colocated(recipe: Recipe) -> list[Violation]:
    if not recipe.colocated:
        return []
    deployment, problems = recipe.deployment, list[Violation]()
    inference = deployment.inference
    if deployment.layout != "one_node":
        why = "each role has its own nodes with this layout, so no GPUs are shared"
        fix = "use layout: one_node, or leave deployment.colocated out"
        problems.append(Violation("deployment.layout", deployment.layout, why, fix))
    if isinstance(inference, Disaggregated):
        why = "cannot share GPUs with the trainer (deployment.colocated)"
        problems.append(Violation("deployment.inference.type", inference.type, why, "use type: single_node"))
    elif inference.gpus_per_node and deployment.train.gpus_per_node not in (None, inference.gpus_per_node):
        why = f"deployment.colocated: the trainer has {deployment.train.gpus_per_node} GPUs, and both use the same ones"
        fix = "set the same number for both, or leave one out"
        problems.append(Violation("deployment.inference.gpus_per_node", str(inference.gpus_per_node), why, fix))
    # The right split depends on the model, so there is no default.
    fraction = recipe.inference.gpu_memory_utilization
    if fraction is None or fraction == 1:
        why = "must be the fraction of each GPU's memory for the engines, because the trainer gets the rest"
        fix = "deployment.colocated needs it, for example 0.4"
        value = "" if fraction is None else f"{fraction:g}"
        problems.append(Violation("inference.gpu_memory_utilization", value, why, fix))
    return problems


def _component_options(recipe: Recipe) -> list[Violation]:
    layout = recipe.deployment.layout
    if layout == "het":
        return []
    unused = [role for role in ROLES if role != "train" and getattr(recipe.slurm, role) != Component()]
    why = f"is not read with deployment.layout: {layout}, because the roles share one allocation"
    return [Violation(f"slurm.{role}", "", why, "move its options to slurm.train") for role in unused]


def _environment_nodes(recipe: Recipe) -> list[Violation]:
    deployment, problems = recipe.deployment, list[Violation]()
    field, nodes, spares = "deployment.environments", deployment.environments, deployment.spares.environments
    if nodes is None and spares:
        fix = f"leave it out, or add `{field}: {{nodes: 1}}`"
        problems.append(Violation("deployment.spares.environments", str(spares), "there are no nodes to replace", fix))
    if nodes is not None and not recipe.samples:
        why = f"task {recipe.task} runs no environments"
        problems.append(Violation(field, f"{nodes.nodes} nodes", why, "leave it out"))
    if nodes is not None and deployment.layout != "het":
        why = "one allocation has nodes of one kind, and environments need no GPUs"
        problems.append(Violation(field, f"{nodes.nodes} nodes", why, "use layout: het, or leave it out"))
    return problems


def _teacher(recipe: Recipe) -> list[Violation]:
    """Check that there is a teacher if and only if a loss or an algorithm uses one."""
    loss, teacher = recipe.trainer.loss, recipe.teacher
    if teacher is not None and recipe.task != "rl":
        return [Violation("teacher", teacher.type, f"task {recipe.task} samples no tokens for it", "leave it out")]
    if recipe.task != "rl":
        return []
    problems: list[Violation] = []
    if isinstance(teacher, PolicyTeacher) and "{hint}" not in teacher.template:
        problems.append(
            Violation("teacher.template", teacher.template, "has no place for the hint", "put {hint} in it")
        )
    ref_kl = None if isinstance(loss, CustomLoss) else loss.ref_kl
    is_default, factor = recipe.orchestrator.advantages == "opd", recipe.orchestrator.opd_reward
    uses_opd = is_default or any(environment.advantages == "opd" for environment in recipe.environments)
    # Custom code may use the teacher without any field that says so.
    is_custom = isinstance(loss, CustomLoss) or recipe.orchestrator.algorithm is not None
    if factor and not uses_opd and recipe.orchestrator.algorithm is None:
        why = f"advantages: {recipe.orchestrator.advantages} already come from the reward"
        fix = "leave it out, or use advantages: opd"
        problems.append(Violation("orchestrator.opd_reward", f"{factor:g}", why, fix))
    if teacher is not None:
        if ref_kl is None and not uses_opd and not is_custom:
            fix = "set trainer.loss.ref_kl or orchestrator.advantages: opd, or leave it out"
            problems.append(Violation("teacher", teacher.type, "nothing uses its log-probabilities", fix))
        return problems
    if ref_kl is not None:
        problems.append(Violation("trainer.loss.ref_kl", f"{ref_kl:g}", "needs a teacher", _ADD_TEACHER))
    if is_default:
        problems.append(Violation("orchestrator.advantages", "opd", "needs a teacher", _ADD_TEACHER))
    return problems
