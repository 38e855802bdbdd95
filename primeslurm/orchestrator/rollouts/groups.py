"""A finished rollout group: all rollouts of one prompt, scored against one another."""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import msgspec
import numpy as np

from primeslurm.wire.batches.file_ranges import StoredArray
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.batches.inline_images import whole
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import Count, DamagedError, decode_msgpack
from primeslurm.wire.stored.digests import XXH3, hasher


class GroupInfo(msgspec.Struct, frozen=True):
    """Everything about a group but its rollouts."""

    id: str
    environment: str
    example: Count
    """Position in the environment's task stream."""
    opened_version: Count
    branches: list[Count]
    """Number of token sequences of each rollout, in the order of the sequences."""
    task: Count | None = None
    """Index in the taskset, where a curriculum has drawn it."""


class GroupHead(msgspec.Struct, frozen=True):
    """What a spool file begins with: all that is decided by before the group is trained."""

    info: GroupInfo
    newest_version: Count
    given_rewards: list[float]
    scored: bool
    size: Count
    """Bytes of the file after the head."""
    digest: str
    """Of these bytes."""


@dataclass(frozen=True)
class RolloutGroup:
    """`rollouts[i]` holds the token sequences of rollout i: one, or several where its conversation branched.

    Where several agents are trained, a rollout has several traces, each with a reward of its own. Every sequence of a
    trace carries its reward.
    """

    id: str
    environment: str
    example: int
    opened_version: int
    rollouts: tuple[tuple[Rollout, ...], ...]
    task: int | None = None
    """Index in the taskset, where a curriculum has drawn it; None: what the stream has at `example`."""

    @property
    def rewards(self) -> list[float]:
        """Return one reward per rollout, less its length penalty; of several traces their mean."""
        return [_mean([trace[0].info.net_reward for trace in traces_of(rollout)]) for rollout in self.rollouts]

    @property
    def given_rewards(self) -> list[float]:
        """Return one reward per rollout, as the environment gave it; of several traces their mean."""
        return [_mean([trace[0].info.reward for trace in traces_of(rollout)]) for rollout in self.rollouts]

    @property
    def size(self) -> int:
        """Return how many rollouts it has."""
        return len(self.rollouts)

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """Return all token sequences, rollout by rollout."""
        return tuple(branch for branches in self.rollouts for branch in branches)

    @property
    def traces(self) -> tuple[tuple[Rollout, ...], ...]:
        """Return the token sequences of each trace, rollout by rollout: one trace a rollout if one agent is trained."""
        return tuple(trace for rollout in self.rollouts for trace in traces_of(rollout))

    @property
    def has_signal(self) -> bool:
        """Tell whether any two rewards of the same agent differ."""
        rewards = defaultdict(set)
        for first, *_ in self.traces:
            rewards[first.info.agent].add(first.info.net_reward)
        return any(len(values) > 1 for values in rewards.values())

    @property
    def scored(self) -> bool:
        """Tell whether the teacher's log-probabilities are there."""
        return all(branch.ref_logprobs is not None for branches in self.rollouts for branch in branches)

    @cached_property
    def newest_version(self) -> int:
        """Return the newest policy version that sampled a token of it."""
        newest = [int(branch.versions.max(initial=-1)) for branches in self.rollouts for branch in branches]
        return max([self.opened_version, *newest])

    def without_older(self, version: int) -> RolloutGroup:
        """Leave out of what is trained the tokens that an older policy than `version` has sampled."""
        rollouts = tuple(tuple(_masked_before(branch, version) for branch in branches) for branches in self.rollouts)
        return replace(self, rollouts=rollouts)

    def cut(self, seq_len: int) -> RolloutGroup:
        """What of it can be trained: at most `seq_len` tokens of each sequence, and no part of an image.

        A first token has no predecessor, so its mask is false.
        """
        rollouts = tuple(tuple(_cut(branch, seq_len) for branch in branches) for branches in self.rollouts)
        return replace(self, rollouts=rollouts)

    def without_experts(self) -> RolloutGroup:
        """Leave out routed experts, and copy nothing."""
        rollouts = tuple(
            tuple(replace(branch, routed_experts=None) for branch in branches) for branches in self.rollouts
        )
        return replace(self, rollouts=rollouts)

    def slim(self) -> RolloutGroup:
        """Copy all of it but routed experts: a fiftieth where there are many."""
        rollouts = tuple(tuple(_slim(branch) for branch in branches) for branches in self.rollouts)
        return replace(self, rollouts=rollouts)

    def to_parts(self) -> list[Frame]:
        """Encode it as the content of a spool file, in parts: arrays, which are not copied, and what is between them.

        The whole is msgpack, (bytes of the head, [[bytes of a frame, ...] of a sequence, ...]), the head being msgpack
        of a GroupHead after its CRC-32. Older releases wrote a GroupInfo in its place.
        """
        parts: list[Frame] = [_list_of(len(self.sequences))]
        for sequence in self.sequences:
            frames = sequence.encode()
            parts.append(_list_of(len(frames)))
            for frame in frames:
                parts += [_bytes_of(memoryview(frame).nbytes), frame]
        size = sum(memoryview(part).nbytes for part in parts)
        return [*begin(self.head(size, digest_of(parts))), *parts]

    def head(self, size: int, digest: str) -> GroupHead:
        """Return the head of its spool file, after which there are `size` bytes of this digest."""
        branches = [len(rollout) for rollout in self.rollouts]
        info = GroupInfo(self.id, self.environment, self.example, self.opened_version, branches, self.task)
        return GroupHead(info, self.newest_version, self.given_rewards, self.scored, size, digest)

    def whole(self) -> RolloutGroup:
        """Return it with its arrays in memory: itself."""
        return self

    def experts_apart(self) -> tuple[RolloutGroup, list[StoredArray | None]]:
        """Return it in memory but for routed experts on disk, and where these are, for each of its sequences."""
        return self, [None] * len(self.sequences)

    def to_bytes(self) -> bytes:
        """Encode it as the content of a spool file, as a whole."""
        return b"".join(self.to_parts())

    @classmethod
    def from_bytes(cls, data: Frame) -> RolloutGroup:
        """Decode what `to_parts` made. Arrays are views of `data`.

        Raises:
            DamagedError: it is damaged, or parts are missing.
        """
        if has_head(data):
            head, sequences = decode_msgpack(data, tuple[memoryview, list[list[memoryview]]])
            info = decode_head(head).info
        else:
            info, sequences = decode_msgpack(data, tuple[GroupInfo, list[list[memoryview]]])
        if len(sequences) != sum(info.branches) or 0 in info.branches or not sequences:
            raise DamagedError(f"group {info.id}: {len(sequences)} sequences for branches {info.branches[:8]}")
        decoded = iter([Rollout.decode(frames) for frames in sequences])
        rollouts = tuple(tuple(next(decoded) for _ in range(count)) for count in info.branches)
        return cls(info.id, info.environment, info.example, info.opened_version, rollouts, info.task)


def begin(head: GroupHead) -> list[Frame]:
    """Encode what a spool file holds up to the end of its head, in parts."""
    encoded = msgspec.msgpack.encode(head)
    return [_list_of(2), _bytes_of(len(encoded) + 4), struct.pack(">I", zlib.crc32(encoded)), encoded]


def digest_of(parts: Iterable[Frame]) -> str:
    """Digest of what a spool file holds after its head."""
    state = hasher()
    for part in parts:
        state.update(part)
    return XXH3 + state.hexdigest()


PREFIX = 6
"""Bytes of a spool file before its head."""
_BYTES = (0xC4, 0xC5, 0xC6)


def has_head(data: Frame) -> bool:
    """Tell whether a spool file that begins so has a head. Those of older releases have none."""
    return len(data) > 1 and data[1] in _BYTES


def head_size(prefix: bytes) -> int:
    """Bytes of the head after the first `PREFIX` of a spool file.

    Raises:
        DamagedError: no spool file begins so.
    """
    if len(prefix) < PREFIX or prefix[:2] != _list_of(2) + b"\xc6":
        raise DamagedError("it does not begin as a group does")
    return int.from_bytes(prefix[2:PREFIX], "big")


def decode_head(data: Frame) -> GroupHead:
    """Decode the bytes of a head. Raises DamagedError."""
    if len(data) < 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise DamagedError("its head is damaged")
    return decode_msgpack(data[4:], GroupHead)


def traces_of(rollout: Sequence[Rollout]) -> list[tuple[Rollout, ...]]:
    """Split the sequences of a rollout into those of each of its traces."""
    return [tuple(trace) for _, trace in groupby(rollout, key=lambda sequence: sequence.info.trace)]


def _list_of(count: int) -> bytes:
    """How msgpack begins a list."""
    return bytes([0x90 | count]) if count < 16 else struct.pack(">BI", 0xDD, count)


def _bytes_of(size: int) -> bytes:
    """How msgpack begins bytes."""
    return struct.pack(">BI", 0xC6, size)


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else sum(values) / len(values)


def _masked_before(sequence: Rollout, version: int) -> Rollout:
    return replace(sequence, mask=sequence.mask & (sequence.versions >= version))


def _slim(sequence: Rollout) -> Rollout:
    kept = {name: array.copy() for name, array in sequence.arrays.items() if name != "routed_experts"}
    return Rollout(sequence.info, **kept)


def _cut(sequence: Rollout, seq_len: int) -> Rollout:
    length, images = whole(sequence.info.images, seq_len)
    arrays = {name: array[:length] for name, array in sequence.arrays.items()}
    arrays["mask"] = arrays["mask"] & (np.arange(len(arrays["mask"])) > 0)
    return replace(sequence, info=msgspec.structs.replace(sequence.info, images=images), **arrays)
