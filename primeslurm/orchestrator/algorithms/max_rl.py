"""Maximum-likelihood RL: a success counts more if successes are rare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms.grpo import centred
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


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
