"""GRPO: compare each rollout with the others of its group."""

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
