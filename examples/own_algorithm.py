"""An algorithm of your own: leave-one-out baselines, and no group that teaches nothing.

`own_algorithm.yaml` names it. The orchestrator and the environment workers import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms import Algorithm, Credit, RolloutGroup, per_rollout


@dataclass(frozen=True)
class LeaveOneOut(Algorithm):
    """A_i = r_i - mean of the other rollouts' rewards (RLOO, arXiv 2402.14740), for every token of rollout i."""

    min_spread: float = 0.0
    """Groups whose best and worst reward are no further apart are not trained."""

    def rejects(self, group: RolloutGroup) -> str | None:
        """The word is counted as `groups/rejected_no_spread` in the metrics."""
        return "no_spread" if max(group.rewards) - min(group.rewards) <= self.min_spread else None

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        """One `Credit` for each sequence."""
        return [per_rollout(group, leave_one_out(group.rewards)) for group in groups]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the others."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
