"""Algorithms: what rollouts' rewards become for the trainer. One file each; `Algorithm` says what one is."""

from __future__ import annotations

from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.algorithms import custom
from primeslurm.orchestrator.algorithms.by_environment import ByEnvironment, Weighted
from primeslurm.orchestrator.algorithms.echo import Echo
from primeslurm.orchestrator.algorithms.grpo import Grpo
from primeslurm.orchestrator.algorithms.hierarchical_grpo import HierarchicalGrpo
from primeslurm.orchestrator.algorithms.max_rl import MaxRl
from primeslurm.orchestrator.algorithms.opd import Opd
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory, per_rollout
from primeslurm.orchestrator.algorithms.rae import Rae
from primeslurm.orchestrator.algorithms.traces import by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.orchestrator import AdvantageRule, Orchestrator

__all__ = [
    "Algorithm",
    "Credit",
    "Echo",
    "Grpo",
    "HierarchicalGrpo",
    "MaxRl",
    "Memory",
    "Opd",
    "Rae",
    "RolloutGroup",
    "by_role",
    "from_recipe",
    "per_rollout",
    "per_trace",
]


def from_recipe(recipe: Recipe) -> Algorithm:
    """The algorithm that a recipe asks for.

    Raises:
        UsageError: there is no such algorithm of one's own, or it needs a teacher and the recipe has none.
    """
    options = recipe.orchestrator
    algorithm = _named(options)
    if options.algorithm is not None and algorithm.needs_teacher and recipe.teacher is None:
        fix = "add `teacher: {type: engines, path: ...}`"
        raise UsageError([Violation(custom.FIELD, options.algorithm.function, "needs a teacher", fix)])
    if any(environment.advantages for environment in recipe.environments):
        own = {each.label: _ruled(each.advantages, options) for each in recipe.environments if each.advantages}
        algorithm = ByEnvironment({each.label: own.get(each.label, algorithm) for each in recipe.environments})
    if options.echo is not None:
        algorithm = Echo(algorithm, options.echo)
    weights = {environment.label: environment.weight for environment in recipe.environments}
    return algorithm if set(weights.values()) <= {1.0} else Weighted(algorithm, weights)


def _named(options: Orchestrator) -> Algorithm:
    if options.algorithm is not None:
        return custom.load(options.algorithm)
    return _ruled(options.advantages, options)


def _ruled(rule: AdvantageRule, options: Orchestrator) -> Algorithm:
    match rule:
        case "grpo":
            return Grpo()
        case "max_rl":
            return MaxRl()
        case "opd":
            return Opd(options.opd_reward)
        case "rae":
            return Rae(options.rae_decay)
        case "hierarchical_grpo":
            return HierarchicalGrpo(options.within_rollout)
