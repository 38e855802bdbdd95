"""Algorithms that compare a rollout with others of its group: GRPO, hierarchical GRPO, and maximum-likelihood RL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class Grpo(Algorithm):
    """A_i = r_i - mean(r) for all tokens of rollout i. With several agents, r are the rewards of the same agent.

    GRPO (arXiv 2402.03300) without the division by the standard deviation, which over-weights prompts with similar
    rewards (arXiv 2503.20783). A group with equal rewards gets zeros: it counts in the batch but has no gradient.
    """

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        return [per_trace(group, by_role(group, centred)) for group in groups]


def centred(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


@dataclass(frozen=True)
class MaxRl(Algorithm):
    """A_i = (r_i - mean(r)) / mean(r) for all tokens of rollout i (arXiv 2602.02710).

    The division makes it the gradient of the log success rate. If the mean is 0 or less, all advantages are 0.
    """

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        return [per_trace(group, by_role(group, relative)) for group in groups]


def relative(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    scale = 1 / mean if mean > 0 else 0.0
    return [advantage * scale for advantage in centred(rewards)]


@dataclass(frozen=True)
class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent, in its rollout or in the whole group.

    Suppose that a proposer writes a problem and several solvers try it. Solvers of one rollout share a task, and are
    compared within the rollout. All proposers of a group share a task, and are compared across the group (prime-rl's
    hierarchical_grpo).
    """

    within_rollout: tuple[str, ...]  # Agents that are compared within a rollout

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        return [per_trace(group, by_role(group, centred, self.within_rollout)) for group in groups]
