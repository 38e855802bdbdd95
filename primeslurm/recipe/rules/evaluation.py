"""Rules for the section `evaluation`."""

from __future__ import annotations

from primeslurm.base.errors import Violation
from primeslurm.recipe.recipe import Recipe
from primeslurm.recipe.rules import sandboxes
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment


def violations(recipe: Recipe) -> list[Violation]:
    """Return contradictions in the evaluation, and between the evaluation and the rest of the recipe."""
    evaluation = recipe.evaluation
    if evaluation is None:
        fix = f"add `evaluation: {{environments: [{_example(recipe)}]}}`"
        why = "task eval needs this section"
        return [Violation("evaluation", "", why, fix)] if recipe.task == "eval" else []
    if not recipe.samples:
        labels = ", ".join(environment.label for environment in evaluation.environments)
        why = f"task {recipe.task} evaluates nothing"
        return [Violation("evaluation", labels, why, "leave it out, or use task: rl or eval")]
    if not evaluation.environments:
        return [Violation("evaluation.environments", "", "needs at least one", "add one, or leave `evaluation` out")]
    problems = _labels(recipe) + sandboxes.violations(evaluation.environments, "evaluation.environments")
    for i, environment in enumerate(evaluation.environments):
        problems += _environment(recipe, environment, f"evaluation.environments.{i}")
    return problems + (_keep_best(recipe) if recipe.task == "rl" else [])


def _example(recipe: Recipe) -> str:
    """Return an entry with the recipe's first environment, and other data if that environment reads a file."""
    if not recipe.environments:
        return "{id: reverse-text}"
    first = recipe.environments[0]
    data = ", args: {path: HELD-OUT-FILE}" if "path" in first.args else ""
    return f"{{id: {first.id}, name: {first.label}-eval{data}}}"


def _labels(recipe: Recipe) -> list[Violation]:
    labels = [environment.label for environment in recipe.evaluation_environments]
    trained = {environment.label for environment in recipe.trained_environments}
    problems = []
    for label in sorted(set(labels)):
        if label in trained:
            why = "is also the name of a training environment"
        elif labels.count(label) > 1:
            why = "names must be unique"
        else:
            continue
        problems.append(Violation("evaluation.environments", label, why, f"use another `name`, such as {label}-eval"))
    return problems


def _environment(recipe: Recipe, environment: EvaluationEnvironment, field: str) -> list[Violation]:
    problems = []
    sampling = environment.sampling
    if sampling.max_tokens is not None and sampling.max_tokens >= recipe.max_len:
        why = f"leaves no room for a prompt in the engines' {recipe.max_len} tokens"
        problems.append(Violation(f"{field}.sampling.max_tokens", str(sampling.max_tokens), why))
    if sampling.temperature == 0 and environment.samples > 1:
        why = "all samples of an example are the same at temperature 0"
        problems.append(
            Violation(f"{field}.samples", str(environment.samples), why, "use samples: 1, or a temperature")
        )
    return problems


def _keep_best(recipe: Recipe) -> list[Violation]:
    """Check that the metric exists, and that every evaluated step has a checkpoint to keep."""
    assert recipe.evaluation is not None
    evaluation, metric = recipe.evaluation, recipe.evaluation.keep_best
    if metric is None:
        return []
    problems = []
    metrics = [f"{each.label}/{name}" for each in evaluation.environments for name in each.comparable]
    if metric not in metrics:
        problems.append(Violation("evaluation.keep_best", metric, "is not measured", f"use {' or '.join(metrics)}"))
    # The last step always has a checkpoint, so an interval beyond it is valid.
    every = recipe.checkpoint.interval
    if evaluation.interval % every and evaluation.interval < recipe.max_steps:
        nearest = max(every, round(evaluation.interval / every) * every)
        why = f"must be a multiple of checkpoint.interval = {every}, because the best step needs a checkpoint"
        problems.append(Violation("evaluation.interval", str(evaluation.interval), why, f"nearest: {nearest}"))
    return problems
