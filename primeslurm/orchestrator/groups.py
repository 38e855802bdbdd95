"""A finished rollout group: all rollouts of one prompt, scored against one another."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from primeslurm.recipe.rollouts import AdvantageRule
from primeslurm.wire.rollouts import Rollout


class GroupInfo(msgspec.Struct, frozen=True):
    """Everything about a group but its rollouts."""

    id: str
    environment: str
    example: int
    """Position in the environment's task stream."""
    opened_version: int
    branches: list[int]
    """Number of token sequences of each rollout, in the order of the sequences."""


@dataclass(frozen=True)
class Group:
    """`rollouts[i]` holds the token sequences of rollout i: one, or several where its conversation branched.

    Every sequence of a rollout carries the rollout's reward.
    """

    id: str
    environment: str
    example: int
    opened_version: int
    rollouts: tuple[tuple[Rollout, ...], ...]

    @property
    def rewards(self) -> list[float]:
        """One reward per rollout."""
        return [branches[0].info.reward for branches in self.rollouts]

    def advantages(self, rule: AdvantageRule) -> list[float]:
        """One per rollout, by a rule of the recipe.

        grpo: reward minus the group's mean (arXiv 2402.03300 without its division by the deviation, which arXiv
        2503.20783 shows to weigh prompts by how even their rewards are). max_rl: that over the mean (arXiv 2602.02710),
        which makes it the gradient of the log of the success rate: the rarer success is, the more a success counts.
        A mean of 0 or less has no logarithm, and gets zeros.
        A group whose rewards are all equal gets zeros: it fills its place in the batch but pulls the policy nowhere.
        opd: as grpo; what its tokens get besides is theirs alone (`packing.documents`).
        """
        mean = sum(self.rewards) / len(self.rewards)
        scale = 1.0
        if rule == "max_rl":
            scale = 1 / mean if mean > 0 else 0.0
        return [(reward - mean) * scale for reward in self.rewards]

    @property
    def has_signal(self) -> bool:
        """Whether any two rewards differ."""
        return len(set(self.rewards)) > 1

    @property
    def scored(self) -> bool:
        """Whether the teacher's log-probabilities are there."""
        return all(branch.ref_logprobs is not None for branches in self.rollouts for branch in branches)

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token of it."""
        newest = [int(branch.versions.max(initial=-1)) for branches in self.rollouts for branch in branches]
        return max([self.opened_version, *newest])

    def to_bytes(self) -> bytes:
        """As the content of a spool file."""
        info = GroupInfo(self.id, self.environment, self.example, self.opened_version, [len(r) for r in self.rollouts])
        sequences = [[bytes(f) for f in branch.encode()] for branches in self.rollouts for branch in branches]
        return msgspec.msgpack.encode((info, sequences))

    @classmethod
    def from_bytes(cls, data: bytes) -> Group:
        """The inverse of `to_bytes`. Raises ValueError or msgspec.MsgspecError on damage."""
        info, sequences = msgspec.msgpack.decode(data, type=tuple[GroupInfo, list[list[bytes]]])
        if len(sequences) != sum(info.branches) or 0 in info.branches:
            raise ValueError(f"group {info.id}: {len(sequences)} sequences for branches {info.branches}")
        decoded = iter([Rollout.decode(frames) for frames in sequences])
        rollouts = tuple(tuple(next(decoded) for _ in range(count)) for count in info.branches)
        return cls(info.id, info.environment, info.example, info.opened_version, rollouts)
