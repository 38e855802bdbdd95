"""The interface of an algorithm, and helpers that turn rewards into the credit of each token."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from primeslurm.orchestrator.rollouts.groups import RolloutGroup, traces_of
from primeslurm.wire.batches.frames import Bool, Float32
from primeslurm.wire.batches.rollout import Rollout

# Named numbers that an algorithm carries from batch to batch.
Memory = Mapping[str, float]
# Maps rewards that are compared with each other to their advantages.
AdvantageRule = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class Credit:
    """How one sequence is trained. All arrays have shape [tokens of the sequence]."""

    advantages: Float32  # Factor of each trained token in the policy loss. Ignored where `mask` is false.
    mask: Bool  # Tokens that the policy loss trains: sampled tokens of the sequence, all or some
    # Factor of each token's cross-entropy (at temperature 1), for tokens outside `mask`. None: 0 everywhere. The sum of
    # all losses of a batch is divided by the number of its tokens in `mask`, or by 1 if there are none.
    cross_entropy: Float32 | None = None

    @classmethod
    def even(cls, sequence: Rollout, advantage: float) -> Credit:
        """Train all sampled tokens of a sequence with the same advantage."""
        return cls(np.full(len(sequence.token_ids), advantage, np.float32), sequence.mask)


@runtime_checkable
class Algorithm(Protocol):
    """Turns rewards into training targets: which groups are kept, and which tokens are trained, and how.

    `rejects` sees each group once, as soon as its last rollout has ended. `assign` sees the groups of one batch
    together, so advantages may depend on the whole batch. `trainer.components.loss` then turns advantages into a loss.

    `assign` and `remember` must be pure functions of their arguments, because a batch is assigned credit again after a
    restart. State belongs in the memory. It is written to disk before its batch is used, and restored after a restart.
    """

    @property
    def needs_teacher(self) -> bool:
        """Whether `assign` reads the teacher's `ref_logprobs` of sequences."""
        return False

    @property
    def needs_observed(self) -> bool:
        """Whether `assign` reads `observed`, the mask of the tokens that environments sent after the first reply."""
        return False

    def rejects(self, group: RolloutGroup) -> str | None:
        """Return why a complete group is not trained, as the name of a counter (`a-z`, digits, `_`); None to keep it.

        Another group is sampled instead.
        """
        return None

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        """Return the memory after a batch, given the memory before it."""
        return memory

    def recalling(self, memory: Memory) -> Algorithm:
        """Return the algorithm for a batch with this memory before it."""
        return self

    @abstractmethod
    def assign(self, groups: Sequence[RolloutGroup]) -> Sequence[Sequence[Credit]]:
        """Assign credit to each token of a batch.

        `groups`: the batch, truncated to what can be trained (`RolloutGroup.cut`). Do not change the arrays. Return
        one list for each group, with a `Credit` for each sequence in the order of `group.sequences`.
        """
        ...


@dataclass(frozen=True)
class Wrapper(Algorithm):
    """An algorithm that changes the credit of another one, and forwards everything else to it."""

    inner: Algorithm

    @property
    def needs_teacher(self) -> bool:
        return self.inner.needs_teacher

    @property
    def needs_observed(self) -> bool:
        return self.inner.needs_observed

    def rejects(self, group: RolloutGroup) -> str | None:
        return self.inner.rejects(group)

    def remember(self, memory: Memory, groups: Sequence[RolloutGroup]) -> Memory:
        return self.inner.remember(memory, groups)

    def recalling(self, memory: Memory) -> Algorithm:
        return replace(self, inner=self.inner.recalling(memory))


def per_rollout(group: RolloutGroup, advantages: Sequence[float]) -> list[Credit]:
    """Give all sampled tokens of rollout i the advantage `advantages[i]`. Return one `Credit` for each sequence."""
    pairs = zip(group.rollouts, advantages, strict=True)
    return [Credit.even(sequence, advantage) for sequences, advantage in pairs for sequence in sequences]


def per_trace(group: RolloutGroup, advantages: Sequence[float]) -> list[Credit]:
    """Give all sampled tokens of trace i the advantage `advantages[i]`. Return one `Credit` for each sequence."""
    pairs = zip(group.traces, advantages, strict=True)
    return [Credit.even(sequence, advantage) for trace, advantage in pairs for sequence in trace]


def by_role(group: RolloutGroup, rule: AdvantageRule, within_rollout: Sequence[str] = ()) -> list[float]:
    """Apply a rule to the rewards of the traces of the same agent. Return one advantage for each of `group.traces`.

    Traces of the agents in `within_rollout` are only compared with those of the same rollout.
    """
    # Traces with the same key are compared: the agent, and for some agents also the rollout.
    compared: dict[Hashable, list[int]] = defaultdict(list)
    rewards: list[float] = []
    for number, rollout in enumerate(group.rollouts):
        for trace in traces_of(rollout):
            agent = trace[0].info.agent
            compared[agent, number if agent in within_rollout else None].append(len(rewards))
            rewards.append(trace[0].info.net_reward)  # all sequences of a trace share its reward
    advantages = [0.0] * len(rewards)
    for members in compared.values():
        for i, advantage in zip(members, rule([rewards[i] for i in members]), strict=True):
            advantages[i] = advantage
    return advantages
