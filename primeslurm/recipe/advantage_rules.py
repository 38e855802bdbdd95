"""Rules between what advantages are made of and the options of that."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.length_penalties import Overlong
from primeslurm.recipe.sections.orchestrator import RAE_DECAY, Environment


def violations(recipe: Recipe) -> list[Violation]:
    """Options of a rule of advantages that no environment follows, and what a rule lacks."""
    options = recipe.orchestrator
    rules = {rule_of(recipe, environment) for environment in recipe.environments}
    agents = ", ".join(options.within_rollout)
    found: list[Violation] = []
    if "hierarchical_grpo" in rules and not agents:
        fix = "name some agents of the environment, or advantages: grpo"
        why = "hierarchical_grpo needs to know whose rewards are compared within a rollout"
        found.append(Violation("orchestrator.within_rollout", "", why, fix))
    if agents and "hierarchical_grpo" not in rules:
        found.append(_unread("within_rollout", agents, "hierarchical_grpo"))
    if options.rae_decay != RAE_DECAY and "rae" not in rules:
        found.append(_unread("rae_decay", f"{options.rae_decay:g}", "rae"))
    for i, environment in enumerate(recipe.environments):
        found += _length_penalty(recipe, environment, f"environments.{i}.length_penalty")
    return found


def rule_of(recipe: Recipe, environment: Environment) -> str | None:
    """Return what an environment's advantages are; None if the user's own algorithm says it."""
    options = recipe.orchestrator
    return environment.advantages or (options.advantages if options.algorithm is None else None)


def _length_penalty(recipe: Recipe, environment: Environment, field: str) -> list[Violation]:
    penalty, options, label = environment.length_penalty, recipe.orchestrator, environment.label
    if penalty is None:
        return []
    found = []
    rule = rule_of(recipe, environment)
    if rule == "max_rl":
        why = f"{label} has advantages: max_rl, whose rewards must not be negative"
        found.append(Violation(field, penalty.type, why, "leave it out, or advantages: grpo"))
    if rule == "opd" and not options.opd_reward:
        why = f"{label} has advantages: opd, which reads no reward"
        found.append(Violation(field, penalty.type, why, "leave it out, or set orchestrator.opd_reward"))
    if isinstance(penalty, Overlong) and penalty.buffer > penalty.max_tokens:
        why = f"is more than max_tokens = {penalty.max_tokens} of {label}"
        found.append(Violation(f"{field}.buffer", str(penalty.buffer), why, f"nearest: {penalty.max_tokens}"))
    return found


def _unread(name: str, value: str, rule: str) -> Violation:
    fix = f"leave it out, or advantages: {rule}"
    return Violation(f"orchestrator.{name}", value, f"no environment has advantages: {rule}", fix)
