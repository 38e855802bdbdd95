"""Group-relative policy optimisation: a rollout is as good as it is better than the others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit
from primeslurm.orchestrator.algorithms.traces import by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class Grpo(Algorithm):
    """A_i = r_i - mean(r), for every token of rollout i; of several agents, r are the rewards of the same agent.

    GRPO (arXiv 2402.03300) without its division by the deviation, which arXiv 2503.20783 shows to weigh prompts by how
    even their rewards are. A group whose rewards are all equal gets zeros: it fills its place in the batch but pulls
    the policy nowhere.
    """

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        """See `Algorithm`."""
        return [per_trace(group, by_role(group, centred)) for group in groups]


def centred(rewards: Sequence[float]) -> list[float]:
    """Subtract from rewards their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
