"""Maximum-likelihood RL: the rarer success is, the more a success counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms.grpo import centred
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit
from primeslurm.orchestrator.algorithms.traces import by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class MaxRl(Algorithm):
    """A_i = (r_i - mean(r)) / mean(r), for every token of rollout i (arXiv 2602.02710).

    The division makes it the gradient of the log of the success rate. A mean of 0 or less has no logarithm, and gets
    zeros.
    """

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        """See `Algorithm`."""
        return [per_trace(group, by_role(group, relative)) for group in groups]


def relative(rewards: Sequence[float]) -> list[float]:
    """Subtract from rewards their mean, and divide by it."""
    mean = sum(rewards) / len(rewards)
    scale = 1 / mean if mean > 0 else 0.0
    return [advantage * scale for advantage in centred(rewards)]
