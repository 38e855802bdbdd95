"""Hierarchical GRPO: compare some agents within their rollout, and the others across the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms.grpo import centred
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent, in its rollout or in the whole group.

    Suppose that a proposer writes a problem and several solvers try it. Solvers of one rollout share a task, and are
    compared within the rollout. All proposers of a group share a task, and are compared across the group (prime-rl's
    hierarchical_grpo).
    """

    within_rollout: tuple[str, ...]
    """Agents that are compared within a rollout."""

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        return [per_trace(group, by_role(group, centred, self.within_rollout)) for group in groups]
