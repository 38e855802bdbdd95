"""Role-conditioned advantage estimation: compare each agent with a running mean of its own rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class Rae(Algorithm):
    """For each trace: b <- decay * b + (1 - decay) * r, then A = r - b. Each environment and agent has its own b.

    SPIRAL (arXiv 2506.24119), for self-play: what an agent can win depends on the game and on the other players. So
    rewards of other agents are no baseline for it, and groups may have a single rollout. Baselines start at 0.
    """

    decay: float = 0.95
    # Baselines before the batch, by `<environment>/<agent>`, or by `<environment>` if there is only one agent
    memory: Memory = field(default_factory=dict)

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        return self._walk(memory, groups)[1]

    def recalling(self, memory: Memory) -> Rae:
        return replace(self, memory=memory)

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        advantages, _ = self._walk(self.memory, groups)
        return [per_trace(group, of_group) for group, of_group in zip(groups, advantages, strict=True)]

    def _walk(self, memory: Memory, groups: Sequence[RolloutGroup]) -> tuple[list[list[float]], Memory]:
        """Return the advantages of each group's traces, and the baselines after them."""
        baselines = dict(memory)
        advantages = []
        for group in groups:
            of_group = []
            for trace in group.traces:
                key = "/".join(filter(None, (group.environment, trace[0].info.agent)))
                reward = trace[0].info.net_reward
                # SPIRAL updates the baseline before it computes the advantage.
                baselines[key] = self.decay * baselines.get(key, 0.0) + (1 - self.decay) * reward
                of_group.append(reward - baselines[key])
            advantages.append(of_group)
        return advantages, baselines
