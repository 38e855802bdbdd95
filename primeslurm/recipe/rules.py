"""Rules that span sections of a recipe."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.models.renderers import AUTO, RENDERERS, is_import_path, nearest_renderer
from primeslurm.recipe import advantage_rules, environment_rules, sampling_rules, sandbox_rules
from primeslurm.recipe.evaluation_rules import evaluation_violations
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.deployment import Disaggregated
from primeslurm.recipe.sections.losses import CustomLoss
from primeslurm.recipe.sections.orchestrator import AnyEnvironment, Orchestrator
from primeslurm.recipe.sections.slurm import Component, Slurm
from primeslurm.recipe.sections.teacher import PolicyTeacher

ROLES = tuple(name for name, info in Slurm.model_fields.items() if info.annotation is Component)
"""Roles that options of Slurm can be given for."""


def violations(recipe: Recipe) -> list[Violation]:
    """Everything in the recipe that contradicts something else in it."""
    found = {"rl": _rl, "sft": _sft, "serve": _serve, "eval": _eval}[recipe.task](recipe)
    found += _colocated(recipe) + _teacher(recipe) + _environment_nodes(recipe) + _renderer(recipe.model.renderer)
    found += _component_options(recipe) + evaluation_violations(recipe)
    found += sandbox_rules.tunnel_violations(_with_workers(recipe))
    max_len = recipe.model.max_len
    if max_len is not None and max_len < recipe.seq_len:
        found.append(Violation("model.max_len", str(max_len), f"is shorter than seq_len = {recipe.seq_len}"))
    return found


def _renderer(name: str) -> list[Violation]:
    if name in (AUTO, *RENDERERS) or is_import_path(name):
        return []
    why = f"no renderer is called so; there are {', '.join((AUTO, *RENDERERS))}, and your own as module:Class"
    return [Violation("model.renderer", name, why, f"nearest: {nearest_renderer(name)}")]


def _with_workers(recipe: Recipe) -> dict[str, AnyEnvironment]:
    trained = {f"environments.{index}": each for index, each in enumerate(recipe.trained_environments)}
    evaluated = enumerate(recipe.evaluation_environments)
    return trained | {f"evaluation.environments.{index}": each for index, each in evaluated}


def _rl(recipe: Recipe) -> list[Violation]:
    orchestrator, found = recipe.orchestrator, _eval(recipe)
    if not recipe.environments:
        found.append(
            Violation("environments", "", "task rl needs at least one", "add `environments: [{id: reverse-text}]`")
        )
    labels = [environment.label for environment in recipe.environments]
    for label in sorted({name for name in labels if labels.count(name) > 1}):
        found.append(Violation("environments", label, "names must be unique", "give each a `name`"))
    found += environment_rules.violations(recipe) + advantage_rules.violations(recipe)
    found += sandbox_rules.violations(recipe.environments) + sampling_rules.violations(recipe)
    found += _algorithm(orchestrator)
    max_tokens = orchestrator.sampling.max_tokens
    if max_tokens is not None and max_tokens >= recipe.seq_len:
        why = f"leaves no room for a prompt in seq_len = {recipe.seq_len}"
        found.append(Violation("orchestrator.sampling.max_tokens", str(max_tokens), why))
    return found


def _algorithm(orchestrator: Orchestrator) -> list[Violation]:
    """An algorithm of one's own says alone what advantages are."""
    if orchestrator.algorithm is None:
        return []
    why = f"orchestrator.algorithm = {orchestrator.algorithm.function} says what advantages are"
    unread: dict[str, str] = {}
    if orchestrator.advantages != "grpo":
        unread["advantages"] = orchestrator.advantages
    if orchestrator.opd_reward:
        unread["opd_reward"] = f"{orchestrator.opd_reward:g}"
    return [Violation(f"orchestrator.{name}", value, why, "leave one out") for name, value in unread.items()]


def _eval(recipe: Recipe) -> list[Violation]:
    """What holds wherever rollouts are sampled."""
    router = recipe.inference.router
    if router.type != "dynamo":
        return []
    why = "its workers serve any policy version, and do not say which one sampled a token"
    return [Violation("inference.router.type", router.type, why, "nearest: vllm-router, or task: serve")]


def _serve(recipe: Recipe) -> list[Violation]:
    if recipe.environments:
        labels = ", ".join(environment.label for environment in recipe.environments)
        return [Violation("environments", labels, "task serve runs none", "leave them out, or task: rl")]
    return []


def _sft(recipe: Recipe) -> list[Violation]:
    if recipe.sft is None:
        return [Violation("sft", "", "task sft needs this section", "add `sft: {data: {type: jsonl, path: ...}}`")]
    return []


def _colocated(recipe: Recipe) -> list[Violation]:
    """Return what contradicts `deployment.colocated`."""
    if not recipe.colocated:
        return []
    deployment, found = recipe.deployment, list[Violation]()
    inference = deployment.inference
    if deployment.layout != "one_node":
        why = "roles have nodes of their own with this layout, so they share no GPUs"
        fix = "use layout: one_node, or leave deployment.colocated out"
        found.append(Violation("deployment.layout", deployment.layout, why, fix))
    if isinstance(inference, Disaggregated):
        why = "cannot share GPUs with the trainer (deployment.colocated)"
        found.append(Violation("deployment.inference.type", inference.type, why, "use type: single_node"))
    elif inference.gpus_per_node and deployment.train.gpus_per_node not in (None, inference.gpus_per_node):
        why = f"deployment.colocated: the trainer has {deployment.train.gpus_per_node} GPUs, and both use the same ones"
        fix = "set the same number for both, or leave one out"
        found.append(Violation("deployment.inference.gpus_per_node", str(inference.gpus_per_node), why, fix))
    share = recipe.inference.gpu_memory_utilization
    if share is None or share == 1:
        why = "must say which share of each GPU's memory the engines get, because the trainer gets the rest"
        fix = "deployment.colocated needs it, for example 0.4"
        given = "" if share is None else f"{share:g}"
        found.append(Violation("inference.gpu_memory_utilization", given, why, fix))
    return found


def _component_options(recipe: Recipe) -> list[Violation]:
    """Return options of Slurm for roles that have no component of their own."""
    layout = recipe.deployment.layout
    if layout == "het":
        return []
    unread = [role for role in ROLES if role != "train" and getattr(recipe.slurm, role) != Component()]
    why = f"is not read with deployment.layout: {layout}, because the roles share one allocation"
    return [Violation(f"slurm.{role}", "", why, "move its options to slurm.train") for role in unread]


def _environment_nodes(recipe: Recipe) -> list[Violation]:
    """Nodes for environments are there for rollouts, and of another kind than all others."""
    deployment, found = recipe.deployment, list[Violation]()
    field, nodes, spares = "deployment.environments", deployment.environments, deployment.spares.environments
    if nodes is None and spares:
        fix = f"leave it out, or add `{field}: {{nodes: 1}}`"
        found.append(Violation("deployment.spares.environments", str(spares), "there are no nodes to replace", fix))
    if nodes is not None and not recipe.samples:
        found.append(
            Violation(field, f"{nodes.nodes} nodes", f"task {recipe.task} runs no environments", "leave it out")
        )
    if nodes is not None and deployment.layout != "het":
        why = "one allocation has nodes of one kind, and environments need none with GPUs"
        found.append(Violation(field, f"{nodes.nodes} nodes", why, "layout: het, or leave it out"))
    return found


def _teacher(recipe: Recipe) -> list[Violation]:
    """A teacher is there if, and only if, something asks for it."""
    loss, teacher = recipe.trainer.loss, recipe.teacher
    if teacher is not None and recipe.task != "rl":
        return [Violation("teacher", teacher.type, f"task {recipe.task} samples nothing for it", "leave it out")]
    if recipe.task != "rl":
        return []
    found: list[Violation] = []
    if isinstance(teacher, PolicyTeacher) and "{hint}" not in teacher.template:
        why = "does not say where the hint goes"
        found.append(Violation("teacher.template", teacher.template, why, "write {hint} in it"))
    ref_kl = None if isinstance(loss, CustomLoss) else loss.ref_kl
    opd, reward = recipe.orchestrator.advantages == "opd", recipe.orchestrator.opd_reward
    somewhere = opd or any(environment.advantages == "opd" for environment in recipe.environments)
    custom = isinstance(loss, CustomLoss) or recipe.orchestrator.algorithm is not None
    if reward and not somewhere and recipe.orchestrator.algorithm is None:
        why = f"advantages: {recipe.orchestrator.advantages} are the reward's already"
        found.append(Violation("orchestrator.opd_reward", f"{reward:g}", why, "leave it out, or advantages: opd"))
    if teacher is not None:
        if ref_kl is None and not somewhere and not custom:
            fix = "set trainer.loss.ref_kl or orchestrator.advantages: opd, or leave it out"
            found.append(Violation("teacher", teacher.type, "nothing asks for its log-probabilities", fix))
        return found
    fix = "add `teacher: {type: engines, path: ...}`"
    if ref_kl is not None:
        found.append(Violation("trainer.loss.ref_kl", f"{ref_kl:g}", "needs a teacher", fix))
    if opd:
        found.append(Violation("orchestrator.advantages", "opd", "needs a teacher", fix))
    return found
