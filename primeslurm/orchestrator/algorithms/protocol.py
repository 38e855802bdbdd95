"""What an algorithm is, and what it says of a sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.frames import Bool, Float32
from primeslurm.wire.batches.rollout import Rollout

Memory = Mapping[str, float]
"""What an algorithm knows of the batches before: named numbers."""


@dataclass(frozen=True)
class Credit:
    """How one sequence is trained. All arrays have shape [n_tokens], in the order of its tokens."""

    advantages: Float32
    """What the policy's loss multiplies each trained token's term by; read where `mask` is true."""
    mask: Bool
    """Tokens that the policy's loss trains: the sampled ones of the sequence, or some of them."""
    cross_entropy: Float32 | None = None
    """Above 0: a token outside `mask` is trained by cross-entropy (at temperature 1) times this. All losses of a batch
    are summed and divided by its number of tokens in `mask`, or by 1 if there is none. None: 0 everywhere."""

    @classmethod
    def even(cls, sequence: Rollout, advantage: float) -> Credit:
        """Train every sampled token of a sequence with the same advantage."""
        return cls(np.full(len(sequence.token_ids), advantage, np.float32), sequence.mask)


@runtime_checkable
class Algorithm(Protocol):
    """Makes training targets of rewards: which groups are kept, which of their tokens are trained, and how.

    It is asked twice. `rejects` sees each group once, as soon as its last rollout is done; what it keeps may still be
    dropped as too old, which is not its business. `assign` sees the groups of one batch together, so that a token's
    advantage may depend on the whole batch. What a policy's loss does with advantages is the trainer's part
    (`trainer.components.loss`).

    A group that was stored is assigned its credit anew after a restart, so `assign` must be a pure function of what it
    is given: the same groups, the same answer. What an algorithm has to know of earlier batches is its memory: it is
    on record for each step before the step's batch is given out, and comes back after a restart.
    """

    @property
    def needs_teacher(self) -> bool:
        """Whether sequences must have the teacher's `ref_logprobs` when `assign` sees them."""
        return False

    @property
    def needs_observed(self) -> bool:
        """Whether environment workers must mark what environments answered, as `observed` of a sequence."""
        return False

    def rejects(self, group: RolloutGroup) -> str | None:
        """Why a complete group is not trained, as a word for its counter (`a-z`, digits, `_`); None: it is kept.

        Another group is sampled in its place.
        """
        return None

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """What is known after a batch, given what was known before it: pure, too. Default: what was known."""
        return memory

    def recalling(self, memory: Memory) -> Algorithm:
        """The same algorithm for a batch before which this was known. Default: itself, which remembers nothing."""
        return self

    @abstractmethod
    def assign(self, groups: Sequence[RolloutGroup]) -> Sequence[Sequence[Credit]]:
        """Credit for each token of a batch.

        Args:
            groups: of the batch, cut to what can be trained (`RolloutGroup.cut`). Their arrays are not to be changed.

        Returns:
            For each group, one `Credit` for each of its sequences, in the order of `group.sequences`.
        """
        ...


def per_rollout(group: RolloutGroup, advantages: Sequence[float]) -> list[Credit]:
    """Give every sampled token of rollout i the advantage `advantages[i]`.

    Returns:
        One `Credit` for each sequence of the group, in the order of `group.sequences`.
    """
    return [
        Credit.even(sequence, advantage)
        for sequences, advantage in zip(group.rollouts, advantages, strict=True)
        for sequence in sequences
    ]
