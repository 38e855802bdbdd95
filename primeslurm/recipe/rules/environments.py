"""Rules for training environments: group sizes, filters, curricula and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.curriculum import Curriculum
from primeslurm.recipe.sections.filters import Filters, Length
from primeslurm.recipe.sections.length_penalties import Overlong
from primeslurm.recipe.sections.orchestrator import RAE_DECAY, Environment


def violations(recipe: Recipe) -> list[Violation]:
    """Return contradictions in and between training environments."""
    problems = _group_sizes(recipe) + _filters("orchestrator.filters", recipe.orchestrator.filters)
    if recipe.environments and not any(environment.weight for environment in recipe.environments):
        fix = "leave it out for one of the environments"
        problems.append(Violation("environments.0.weight", "0", "no environment would be trained", fix))
    problems += _advantage_options(recipe)
    for i, environment in enumerate(recipe.environments):
        problems += _environment(recipe, environment, f"environments.{i}")
    return problems


def rule_of(recipe: Recipe, environment: Environment) -> str | None:
    """Return the environment's rule for advantages; None if a custom algorithm computes them."""
    options = recipe.orchestrator
    return environment.advantages or (options.advantages if options.algorithm is None else None)


def _advantage_options(recipe: Recipe) -> list[Violation]:
    """Return options of rules for advantages that no environment uses, and options that a rule needs."""
    options = recipe.orchestrator
    rules = {rule_of(recipe, environment) for environment in recipe.environments}
    agents = ", ".join(options.within_rollout)
    problems: list[Violation] = []
    if "hierarchical_grpo" in rules and not agents:
        fix = "name some agents of the environment, or use advantages: grpo"
        why = "hierarchical_grpo needs the agents whose rewards are compared within a rollout"
        problems.append(Violation("orchestrator.within_rollout", "", why, fix))
    if agents and "hierarchical_grpo" not in rules:
        problems.append(_unused_option("within_rollout", agents, "hierarchical_grpo"))
    if options.rae_decay != RAE_DECAY and "rae" not in rules:
        problems.append(_unused_option("rae_decay", f"{options.rae_decay:g}", "rae"))
    return problems


def _unused_option(name: str, value: str, rule: str) -> Violation:
    fix = f"leave it out, or use advantages: {rule}"
    return Violation(f"orchestrator.{name}", value, f"no environment has advantages: {rule}", fix)


def _environment(recipe: Recipe, environment: Environment, field: str) -> list[Violation]:
    problems, label = _filters(f"{field}.filters", environment.filters or ()), environment.label
    problems += _curriculum(environment.curriculum, f"{field}.curriculum") if environment.curriculum else []
    max_tokens = environment.sampling.max_tokens
    if max_tokens is not None and max_tokens >= recipe.seq_len:
        why = f"leaves no room for a prompt of {label} in seq_len = {recipe.seq_len}"
        problems.append(Violation(f"{field}.sampling.max_tokens", str(max_tokens), why))
    if environment.advantages == "opd" and recipe.teacher is None:
        fix = "add `teacher: {type: engines, path: ...}`"
        problems.append(Violation(f"{field}.advantages", "opd", f"{label} needs a teacher", fix))
    rule = rule_of(recipe, environment)
    # For these rules, equal rewards in a group do not mean that all advantages are zero.
    basis = {"opd": "the teacher's log-probabilities", "rae": "a running mean"}
    if rule in basis and any(each.type == "zero_advantage" for each in recipe.filters(environment)):
        filters = "orchestrator.filters" if environment.filters is None else f"{field}.filters"
        why = f"advantages of {label} come from {basis[rule]}, not from the rewards of a group"
        problems.append(Violation(filters, "zero_advantage", why, "leave it out"))
    return problems + _length_penalty(recipe, environment, f"{field}.length_penalty")


def _length_penalty(recipe: Recipe, environment: Environment, field: str) -> list[Violation]:
    penalty, label, rule = environment.length_penalty, environment.label, rule_of(recipe, environment)
    if penalty is None:
        return []
    problems = []
    if rule == "max_rl":
        why = f"{label} has advantages: max_rl, whose rewards must not be negative"
        problems.append(Violation(field, penalty.type, why, "leave it out, or use advantages: grpo"))
    if rule == "opd" and not recipe.orchestrator.opd_reward:
        why = f"{label} has advantages: opd, which reads no reward"
        problems.append(Violation(field, penalty.type, why, "leave it out, or set orchestrator.opd_reward"))
    if isinstance(penalty, Overlong) and penalty.buffer > penalty.max_tokens:
        why = f"is more than max_tokens = {penalty.max_tokens} of {label}"
        problems.append(Violation(f"{field}.buffer", str(penalty.buffer), why, f"nearest: {penalty.max_tokens}"))
    return problems


def _group_sizes(recipe: Recipe) -> list[Violation]:
    """Check that whole groups fill a batch of exactly `batch_size` rollouts, in whatever order they finish."""
    options = recipe.orchestrator
    uses_default = not recipe.environments or any(each.group_size is None for each in recipe.environments)
    names = {options.group_size: "orchestrator.group_size"} if uses_default else {}
    fields = dict(names)
    for i, environment in enumerate(recipe.environments):
        size = recipe.group_size(environment)
        fields.setdefault(size, f"environments.{i}.group_size")
        names.setdefault(size, f"the group_size of {environment.label}")
    smallest, largest = min(names), max(names)
    problems = []
    if uneven := [size for size in names if options.batch_size % size]:
        nearest = max(largest, round(options.batch_size / largest) * largest)
        why = f"must be a multiple of {names[max(uneven)]} = {max(uneven)}"
        problems.append(Violation("orchestrator.batch_size", str(options.batch_size), why, f"nearest: {nearest}"))
    # If each size divides the next larger one and the batch, complete groups of any mixture fill a batch exactly.
    for small, large in pairwise(sorted(names)):
        if large % small:
            why = f"must be a multiple of {names[small]} = {small}: batches could not be filled with whole groups"
            fix = f"nearest: {round(large / small) * small}"
            problems.append(Violation(fields[large], str(large), why, fix))
    inflight, staleness = options.max_inflight_rollouts, options.staleness
    if inflight is not None and inflight < largest:
        why = f"must be at least {names[largest]} = {largest}"
        problems.append(Violation("orchestrator.max_inflight_rollouts", str(inflight), why, f"nearest: {largest}"))
    if staleness.rule in ("partial", "carry") and staleness.min_rollouts > smallest:
        field, value = "orchestrator.staleness.min_rollouts", str(staleness.min_rollouts)
        why = f"is more than {names[smallest]} = {smallest}: no group could be completed early"
        problems.append(Violation(field, value, why, f"nearest: {smallest}"))
    return problems


def _filters(field: str, filters: Filters) -> list[Violation]:
    problems = [
        Violation(field, name, "is given twice", "keep one filter of each type")
        for name in repeated([each.type for each in filters])
    ]
    for i, each in enumerate(filters):
        if isinstance(each, Length) and each.max_tokens is not None and each.max_tokens < each.min_tokens:
            why = f"is less than min_tokens = {each.min_tokens}"
            problems.append(Violation(f"{field}.{i}.max_tokens", str(each.max_tokens), why))
    return problems


def repeated(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted({name for name in names if names.count(name) > 1})


def _curriculum(curriculum: Curriculum, field: str) -> list[Violation]:
    problems = []
    if curriculum.hard >= curriculum.easy:
        why = f"must be below curriculum.easy = {curriculum.easy:g}"
        problems.append(Violation(f"{field}.hard", f"{curriculum.hard:g}", why))
    if not curriculum.shares.unseen:
        why = "new examples would never be drawn after the first one"
        problems.append(Violation(f"{field}.shares.unseen", "0", why, "use a positive weight"))
    return problems
