"""Algorithms made of others: one for each environment, weights of environments, and echo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory, Wrapper
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.frames import Float32
from primeslurm.wire.batches.rollout import Rollout


@dataclass(frozen=True)
class ByEnvironment(Algorithm):
    """Uses a different algorithm for each environment. Each sees all groups of its environment in a batch."""

    by_label: Mapping[str, Algorithm]

    @property
    def needs_teacher(self) -> bool:
        return any(algorithm.needs_teacher for algorithm in self.by_label.values())

    @property
    def needs_observed(self) -> bool:
        return any(algorithm.needs_observed for algorithm in self.by_label.values())

    def rejects(self, group: RolloutGroup) -> str | None:
        return self.by_label[group.environment].rejects(group)

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        for label, algorithm in self.by_label.items():  # all algorithms share one memory
            memory = algorithm.remember(memory, [group for group in groups if group.environment == label])
        return memory

    def recalling(self, memory: Memory) -> ByEnvironment:
        return replace(self, by_label={label: one.recalling(memory) for label, one in self.by_label.items()})

    def assign(self, groups: Sequence[RolloutGroup]) -> list[Sequence[Credit]]:
        indices: dict[str, list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            indices[group.environment].append(index)
        by_index: dict[int, Sequence[Credit]] = {}
        for label, members in indices.items():
            by_index |= zip(members, self.by_label[label].assign([groups[index] for index in members]), strict=True)
        return [by_index[index] for index in range(len(groups))]


@dataclass(frozen=True)
class Weighted(Wrapper):
    """Multiplies advantages and cross-entropy factors by the weight of the environment.

    The inner algorithm does not see groups of weight 0, and none of their tokens is trained.
    """

    weights: Mapping[str, float]  # By environment label

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        return self.inner.remember(memory, [group for group in groups if self.weights[group.environment]])

    def assign(self, groups: Sequence[RolloutGroup]) -> list[Sequence[Credit]]:
        # The inner algorithm must not see groups of weight 0, because they would change means over the batch.
        trained = iter(self.inner.assign([group for group in groups if self.weights[group.environment]]))
        return [
            [_scaled(credit, weight) for credit in next(trained)]
            if (weight := self.weights[group.environment])
            else [_untrained(len(sequence.token_ids)) for sequence in group.sequences]
            for group in groups
        ]


def _scaled(credit: Credit, weight: float) -> Credit:
    factor = np.float32(weight)
    cross_entropy = None if credit.cross_entropy is None else credit.cross_entropy * factor
    return replace(credit, advantages=credit.advantages * factor, cross_entropy=cross_entropy)


def _untrained(length: int) -> Credit:
    return Credit(np.zeros(length, np.float32), np.zeros(length, np.bool_))


@dataclass(frozen=True)
class Echo(Wrapper):
    """Adds weight * mean cross-entropy of the batch's observed tokens to another algorithm's loss (prime-rl's echo).

    Observed tokens are those of the environment's messages after the first reply. The trainer divides the sum of a
    batch's losses by its N tokens in `mask`, so each of the M observed tokens gets the factor weight * N / M.
    """

    weight: float
    needs_observed = True

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        credits = self.inner.assign(groups)
        trained = sum(int(credit.mask.sum()) for of_group in credits for credit in of_group)
        observed = sum(int(_observed(sequence).sum()) for group in groups for sequence in group.sequences)
        # max(1, trained), because the trainer divides by 1 if a batch has no trained tokens.
        factor = self.weight * max(1, trained) / max(1, observed)
        return [
            [_add(credit, sequence, factor) for credit, sequence in zip(of_group, group.sequences, strict=True)]
            for of_group, group in zip(credits, groups, strict=True)
        ]


def _add(credit: Credit, sequence: Rollout, factor: float) -> Credit:
    added: Float32 = np.where(_observed(sequence), factor, 0.0).astype(np.float32)
    return replace(credit, cross_entropy=added if credit.cross_entropy is None else credit.cross_entropy + added)


def _observed(sequence: Rollout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    # Rollouts from before `echo` was added to a running recipe have no marks.
    return np.zeros(len(sequence.token_ids), np.bool_) if sequence.observed is None else sequence.observed
