"""Each environment's own algorithm, and how much what it says counts beside the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory
from primeslurm.orchestrator.rollouts.groups import RolloutGroup


@dataclass(frozen=True)
class ByEnvironment(Algorithm):
    """Asks for each group the algorithm of its environment, which sees the environment's groups of a batch together."""

    by_label: Mapping[str, Algorithm]

    @property
    def needs_teacher(self) -> bool:
        """Whether any environment's algorithm does."""
        return any(algorithm.needs_teacher for algorithm in self.by_label.values())

    @property
    def needs_observed(self) -> bool:
        """Whether any environment's algorithm does."""
        return any(algorithm.needs_observed for algorithm in self.by_label.values())

    def rejects(self, group: RolloutGroup) -> str | None:
        """Ask the environment's algorithm."""
        return self.by_label[group.environment].rejects(group)

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """Ask each environment's algorithm about its groups. They share one memory."""
        for label, algorithm in self.by_label.items():
            memory = algorithm.remember(memory, [group for group in groups if group.environment == label])
        return memory

    def recalling(self, memory: Memory) -> ByEnvironment:
        """Have each environment's algorithm recall."""
        return replace(self, by_label={label: one.recalling(memory) for label, one in self.by_label.items()})

    def assign(self, groups: Sequence[RolloutGroup]) -> list[Sequence[Credit]]:
        """See `Algorithm`."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, group in enumerate(groups):
            places[group.environment].append(place)
        found: dict[int, Sequence[Credit]] = {}
        for label, mine in places.items():
            credits = self.by_label[label].assign([groups[place] for place in mine])
            found |= zip(mine, credits, strict=True)
        return [found[place] for place in range(len(groups))]


@dataclass(frozen=True)
class Weighted(Algorithm):
    """Multiplies what another algorithm says of an environment's groups: advantages, and factors of cross-entropy.

    Groups of weight 0 are shown to nobody, and none of their tokens is trained.
    """

    inner: Algorithm
    weights: Mapping[str, float]
    """By environment label."""

    @property
    def needs_teacher(self) -> bool:
        """Ask the inner algorithm."""
        return self.inner.needs_teacher

    @property
    def needs_observed(self) -> bool:
        """Ask the inner algorithm."""
        return self.inner.needs_observed

    def rejects(self, group: RolloutGroup) -> str | None:
        """Ask the inner algorithm."""
        return self.inner.rejects(group)

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """Ask the inner algorithm."""
        return self.inner.remember(memory, [group for group in groups if self.weights[group.environment]])

    def recalling(self, memory: Memory) -> Weighted:
        """Have the inner algorithm recall."""
        return replace(self, inner=self.inner.recalling(memory))

    def assign(self, groups: Sequence[RolloutGroup]) -> list[Sequence[Credit]]:
        """See `Algorithm`."""
        trained = iter(self.inner.assign([group for group in groups if self.weights[group.environment]]))
        return [
            [_scaled(credit, weight) for credit in next(trained)]
            if (weight := self.weights[group.environment])
            else [_nothing(len(sequence.token_ids)) for sequence in group.sequences]
            for group in groups
        ]


def _scaled(credit: Credit, weight: float) -> Credit:
    factor = np.float32(weight)
    entropy = None if credit.cross_entropy is None else credit.cross_entropy * factor
    return replace(credit, advantages=credit.advantages * factor, cross_entropy=entropy)


def _nothing(length: int) -> Credit:
    return Credit(np.zeros(length, np.float32), np.zeros(length, np.bool_))
