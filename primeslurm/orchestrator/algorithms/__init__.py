"""Algorithms that turn the rewards of rollouts into training targets. `protocol` defines their interface."""

from __future__ import annotations

from primeslurm.base.errors import UsageError, Violation
from primeslurm.orchestrator.algorithms import custom
from primeslurm.orchestrator.algorithms.composition import ByEnvironment, Echo, Weighted
from primeslurm.orchestrator.algorithms.grpo import Grpo, HierarchicalGrpo, MaxRl
from primeslurm.orchestrator.algorithms.opd import Opd
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory, by_role, per_rollout, per_trace
from primeslurm.orchestrator.algorithms.rae import Rae
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
    """Construct the algorithm of a recipe. Raises UsageError if a user's own algorithm cannot be loaded or used."""
    options = recipe.orchestrator
    if options.algorithm is None:
        algorithm = _built_in(options.advantages, options)
    else:
        algorithm = custom.load(options.algorithm)
        if algorithm.needs_teacher and recipe.teacher is None:
            fix = "add `teacher: {type: engines, path: ...}`"
            raise UsageError([Violation(custom.FIELD, options.algorithm.function, "needs a teacher", fix)])
    if any(environment.advantages for environment in recipe.environments):
        # Environments without a rule of their own use the run's algorithm.
        by_label = {
            each.label: _built_in(each.advantages, options) if each.advantages else algorithm
            for each in recipe.environments
        }
        algorithm = ByEnvironment(by_label)
    # The weights come last, because they also scale the cross-entropy that echo adds.
    if options.echo is not None:
        algorithm = Echo(algorithm, options.echo)
    weights = {environment.label: environment.weight for environment in recipe.environments}
    return algorithm if set(weights.values()) <= {1.0} else Weighted(algorithm, weights)


def _built_in(rule: AdvantageRule, options: Orchestrator) -> Algorithm:
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
