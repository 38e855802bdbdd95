"""Hierarchical GRPO: some agents are compared within their rollout, the others across the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms.grpo import centred
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit
from primeslurm.orchestrator.algorithms.traces import by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class HierarchicalGrpo(Algorithm):
    """A = r - mean(r) over the traces of the same agent: of the rollout for some agents, of the group for the others.

    Where a proposer writes a problem and several solvers try it, solvers of one problem had the same task, and those of
    other rollouts had another; proposers of a group all had the same one (prime-rl's hierarchical_grpo).
    """

    within_rollout: tuple[str, ...]
    """Names of the agents that are compared within a rollout."""

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        """See `Algorithm`."""
        return [per_trace(group, by_role(group, centred, self.within_rollout)) for group in groups]
