"""Rules about the evaluation of a recipe."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.recipe import sandbox_rules
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment


def evaluation_violations(recipe: Recipe) -> list[Violation]:
    """Everything about evaluation that contradicts itself or the rest of the recipe."""
    evaluation = recipe.evaluation
    if evaluation is None:
        fix = f"add `evaluation: {{environments: [{_held_out(recipe)}]}}`"
        why = "task eval needs this section"
        return [Violation("evaluation", "", why, fix)] if recipe.task == "eval" else []
    if not recipe.samples:
        labels = ", ".join(environment.label for environment in evaluation.environments)
        return [
            Violation(
                "evaluation", labels, f"task {recipe.task} evaluates nothing", "leave it out, or task: rl or eval"
            )
        ]
    if not evaluation.environments:
        return [Violation("evaluation.environments", "", "needs at least one", "add one, or leave `evaluation` out")]
    found = _labels(recipe) + sandbox_rules.violations(evaluation.environments, "evaluation.environments")
    for i, environment in enumerate(evaluation.environments):
        found += _environment(recipe, environment, f"evaluation.environments.{i}")
    return found + (_best(recipe) if recipe.task == "rl" else [])


def _held_out(recipe: Recipe) -> str:
    """An entry that evaluates on the recipe's first environment, with other data if it reads a file."""
    if not recipe.environments:
        return "{id: reverse-text}"
    first = recipe.environments[0]
    data = ", args: {path: HELD-OUT-FILE}" if "path" in first.args else ""
    return f"{{id: {first.id}, name: {first.label}-eval{data}}}"


def _labels(recipe: Recipe) -> list[Violation]:
    """Training environments among themselves are looked at elsewhere."""
    assert recipe.evaluation is not None
    labels = [environment.label for environment in recipe.evaluation.environments]
    trained = {environment.label for environment in recipe.environments if recipe.task == "rl"}
    found = []
    for label in sorted(set(labels)):
        if label in trained:
            why = "is the name of a training environment, too"
        elif labels.count(label) > 1:
            why = "names must be unique"
        else:
            continue
        found.append(Violation("evaluation.environments", label, why, f"give it another `name`, as {label}-eval"))
    return found


def _environment(recipe: Recipe, environment: EvaluationEnvironment, field: str) -> list[Violation]:
    found = []
    sampling = environment.sampling
    if sampling.max_tokens is not None and sampling.max_tokens >= recipe.max_len:
        why = f"leaves no room for a prompt in the engines' {recipe.max_len} tokens"
        found.append(Violation(f"{field}.sampling.max_tokens", str(sampling.max_tokens), why))
    if sampling.temperature == 0 and environment.samples > 1:
        why = "all samples of an example are the same at temperature 0"
        found.append(Violation(f"{field}.samples", str(environment.samples), why, "samples: 1, or a temperature"))
    return found


def _best(recipe: Recipe) -> list[Violation]:
    """The metric must be there, and every evaluated step have a checkpoint to keep."""
    assert recipe.evaluation is not None
    evaluation, wanted = recipe.evaluation, recipe.evaluation.keep_best
    if wanted is None:
        return []
    found = []
    known = [f"{each.label}/{metric}" for each in evaluation.environments for metric in each.comparable]
    if wanted not in known:
        found.append(Violation("evaluation.keep_best", wanted, "is not measured", f"one of {', '.join(known)}"))
    every = recipe.checkpoint.interval
    if evaluation.interval % every and evaluation.interval < recipe.max_steps:
        nearest = max(every, round(evaluation.interval / every) * every)
        why = f"must be a multiple of checkpoint.interval = {every}: the best step is to have a checkpoint"
        found.append(Violation("evaluation.interval", str(evaluation.interval), why, f"nearest: {nearest}"))
    return found
