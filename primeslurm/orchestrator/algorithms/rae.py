"""Role-conditioned advantage estimation: each role is compared with its own rewards of late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory
from primeslurm.orchestrator.algorithms.traces import per_trace, reward_of
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class Rae(Algorithm):
    """b <- decay * b + (1 - decay) * r, then A = r - b, trace by trace; b is of the trace's environment and agent.

    SPIRAL (arXiv 2506.24119), for self-play: what a role can win depends on the game and on who plays the others, so
    rewards of other roles say nothing about it, and a group of one rollout suffices. Baselines begin at 0.
    """

    decay: float = 0.95
    memory: Memory = field(default_factory=dict)
    """The baselines before the batch, by `<environment>/<agent>`, or `<environment>` where there is but one agent."""

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """See `Algorithm`: the baselines."""
        return self._walk(memory, groups)[1]

    def recalling(self, memory: Memory) -> Rae:
        """See `Algorithm`."""
        return replace(self, memory=memory)

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        """See `Algorithm`."""
        advantages, _ = self._walk(self.memory, groups)
        return [per_trace(group, mine) for group, mine in zip(groups, advantages, strict=True)]

    def _walk(self, memory: Memory, groups: Sequence[RolloutGroup]) -> tuple[list[list[float]], Memory]:
        """Advantages of the traces of each group, and the baselines after them."""
        baselines = dict(memory)
        found = []
        for group in groups:
            mine = []
            for trace in group.traces:
                key = "/".join(filter(None, (group.environment, trace[0].info.agent)))
                reward = reward_of(trace)
                baselines[key] = self.decay * baselines.get(key, 0.0) + (1 - self.decay) * reward
                mine.append(reward - baselines[key])
            found.append(mine)
        return found, baselines
