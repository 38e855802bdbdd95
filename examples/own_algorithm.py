"""Example of an own algorithm: leave-one-out baselines, without groups that give no gradient.

`own_algorithm.yaml` selects it. The orchestrator and the environment workers import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms import Algorithm, Credit, RolloutGroup, per_rollout


@dataclass(frozen=True)
class LeaveOneOut(Algorithm):
    """A_i = r_i - mean of the other rollouts' rewards, for all tokens of rollout i (RLOO, arXiv 2402.14740)."""

    min_spread: float = 0.0
    """Groups whose best and worst rewards differ by at most this much are rejected."""

    def rejects(self, group: RolloutGroup) -> str | None:
        # The metric `groups/rejected_no_spread` counts these groups.
        return "no_spread" if max(group.rewards) - min(group.rewards) <= self.min_spread else None

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        # per_rollout returns one Credit for each sequence.
        return [per_rollout(group, leave_one_out(group.rewards)) for group in groups]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Subtract from each reward the mean of the others."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
