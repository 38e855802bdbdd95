"""Echo: whatever trains the sampled tokens, what environments answered is trained beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, Memory
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.frames import Float32
from primeslurm.wire.batches.rollout import Rollout


@dataclass(frozen=True)
class Echo(Algorithm):
    """Adds to another algorithm: weight * mean cross-entropy of the batch's observed tokens (prime-rl's echo).

    Observed are the tokens of the environment's messages after the policy's first answer. A batch's losses are divided
    by its N tokens in `mask`, so each of the M observed ones has the factor weight * N / M.
    """

    inner: Algorithm
    weight: float
    needs_observed = True

    @property
    def needs_teacher(self) -> bool:
        """Ask the inner algorithm."""
        return self.inner.needs_teacher

    def rejects(self, group: RolloutGroup) -> str | None:
        """Ask the inner algorithm."""
        return self.inner.rejects(group)

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """Ask the inner algorithm."""
        return self.inner.remember(memory, groups)

    def recalling(self, memory: Memory) -> Echo:
        """Have the inner algorithm recall."""
        return replace(self, inner=self.inner.recalling(memory))

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        """See `Algorithm`. A token that the inner algorithm has cross-entropy on gets the sum of both factors."""
        credits = self.inner.assign(groups)
        trained = sum(int(credit.mask.sum()) for mine in credits for credit in mine)
        observed = sum(int(_observed(sequence).sum()) for group in groups for sequence in group.sequences)
        factor = self.weight * max(1, trained) / max(1, observed)
        return [
            [_with(credit, sequence, factor) for credit, sequence in zip(mine, group.sequences, strict=True)]
            for mine, group in zip(credits, groups, strict=True)
        ]


def _with(credit: Credit, sequence: Rollout, factor: float) -> Credit:
    added: Float32 = np.where(_observed(sequence), factor, 0.0).astype(np.float32)
    return replace(credit, cross_entropy=added if credit.cross_entropy is None else credit.cross_entropy + added)


def _observed(sequence: Rollout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """None are marked in a rollout from before the recipe had an echo."""
    return np.zeros(len(sequence.token_ids), np.bool_) if sequence.observed is None else sequence.observed
