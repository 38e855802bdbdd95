"""A finished rollout group: all rollouts of one prompt, whose rewards are compared; and the format of its file."""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import msgspec

from primeslurm.wire.batches.file_ranges import StoredArray
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.batches.inline_images import whole
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import Count, DamagedError, decode_msgpack
from primeslurm.wire.stored.checksums import XXH3, hasher


class GroupInfo(msgspec.Struct, frozen=True):
    """Everything about a group but its rollouts."""

    id: str
    environment: str
    example: Count  # position in the environment's task stream
    opened_version: Count
    branches: list[Count]  # number of token sequences of each rollout, in the order of the sequences
    task: Count | None = None  # index in the taskset, if a curriculum chose the task


class GroupHead(msgspec.Struct, frozen=True):
    """The head of a group's file: everything that decisions need before the group is trained."""

    info: GroupInfo
    newest_version: Count
    given_rewards: list[float]
    scored: bool
    size: Count  # bytes of the file after the head
    digest: str  # digest of these bytes


@dataclass(frozen=True)
class RolloutGroup:
    """`rollouts[i]` holds the token sequences of rollout i: one, or several if its conversation branched.

    If several agents are trained, a rollout has several traces, each with its own reward. Every sequence of a trace
    carries the trace's reward.
    """

    id: str
    environment: str
    example: int
    opened_version: int
    rollouts: tuple[tuple[Rollout, ...], ...]
    # Index in the taskset, if a curriculum chose the task; None: the task at `example` of the stream.
    task: int | None = None

    @property
    def rewards(self) -> list[float]:
        """Return each rollout's reward minus its length penalty. Several traces are averaged."""
        return [_mean([trace[0].info.net_reward for trace in traces_of(rollout)]) for rollout in self.rollouts]

    @property
    def given_rewards(self) -> list[float]:
        """Return each rollout's reward from the environment. Several traces are averaged."""
        return [_mean([trace[0].info.reward for trace in traces_of(rollout)]) for rollout in self.rollouts]

    @property
    def size(self) -> int:
        return len(self.rollouts)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for sequence in self.sequences for array in sequence.arrays.values())

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        return tuple(sequence for rollout in self.rollouts for sequence in rollout)

    @property
    def traces(self) -> tuple[tuple[Rollout, ...], ...]:
        return tuple(trace for rollout in self.rollouts for trace in traces_of(rollout))

    @property
    def has_signal(self) -> bool:
        """Return whether any two rewards of the same agent differ."""
        rewards = defaultdict(set)
        for first, *_ in self.traces:
            rewards[first.info.agent].add(first.info.net_reward)
        return any(len(values) > 1 for values in rewards.values())

    @property
    def scored(self) -> bool:
        """Return whether all sequences have the teacher's log-probabilities."""
        return all(sequence.ref_logprobs is not None for sequence in self.sequences)

    @cached_property
    def newest_version(self) -> int:
        """Return the newest policy version that sampled a token."""
        return max([self.opened_version, *(int(sequence.versions.max(initial=-1)) for sequence in self.sequences)])

    def without_older(self, version: int) -> RolloutGroup:
        """Return the group with tokens masked that a policy older than `version` sampled."""
        return self._map(lambda sequence: _without_older(sequence, version))

    def cut(self, seq_len: int) -> RolloutGroup:
        """Return the trainable part: at most `seq_len` tokens per sequence, without partial images."""
        # The first token is masked because it has no predecessor.
        return self._map(lambda sequence: _cut(sequence, seq_len))

    def without_experts(self) -> RolloutGroup:
        """Return the group without routed experts, sharing all other arrays."""
        if all(sequence.routed_experts is None for sequence in self.sequences):
            return self
        return self._map(lambda sequence: replace(sequence, routed_experts=None))

    def slim(self) -> RolloutGroup:
        """Return a copy of everything but routed experts, which can be 98 % of a group."""
        return self._map(_slim)

    def _map(self, change: Callable[[Rollout], Rollout]) -> RolloutGroup:
        return replace(self, rollouts=tuple(tuple(change(one) for one in rollout) for rollout in self.rollouts))

    def to_parts(self) -> list[Frame]:
        """Encode the content of the group's file as a list of parts, without copying arrays."""
        # The content is msgpack: (bytes of the head, [[bytes of a frame, ...] per sequence, ...]). The head is a CRC-32
        # and a GroupHead in msgpack.
        parts: list[Frame] = [_list_start(len(self.sequences))]
        for sequence in self.sequences:
            frames = sequence.encode()
            parts.append(_list_start(len(frames)))
            for frame in frames:
                parts += [_bytes_start(memoryview(frame).nbytes), frame]
        size = sum(memoryview(part).nbytes for part in parts)
        return [*begin(self.head(size, digest_of(parts))), *parts]

    def head(self, size: int, digest: str) -> GroupHead:
        """Return the head of the group's file, which is followed by `size` bytes with this digest."""
        branches = [len(rollout) for rollout in self.rollouts]
        info = GroupInfo(self.id, self.environment, self.example, self.opened_version, branches, self.task)
        return GroupHead(info, self.newest_version, self.given_rewards, self.scored, size, digest)

    def whole(self) -> RolloutGroup:
        """Return the group with all arrays in memory."""
        return self

    def experts_apart(self) -> tuple[RolloutGroup, list[StoredArray | None]]:
        """Return the group in memory without routed experts on disk, and where these are for each sequence."""
        return self, [None] * len(self.sequences)

    def to_bytes(self) -> bytes:
        return b"".join(self.to_parts())

    @classmethod
    def from_bytes(cls, data: Frame) -> RolloutGroup:
        """Decode the content of a group's file. Arrays are views of `data`. Raise DamagedError."""
        head, sequences = decode_msgpack(data, tuple[memoryview, list[list[memoryview]]])
        info = decode_head(head).info
        if len(sequences) != sum(info.branches) or 0 in info.branches or not sequences:
            raise DamagedError(f"group {info.id}: {len(sequences)} sequences for branches {info.branches[:8]}")
        decoded = iter([Rollout.decode(frames) for frames in sequences])
        rollouts = tuple(tuple(next(decoded) for _ in range(count)) for count in info.branches)
        return cls(info.id, info.environment, info.example, info.opened_version, rollouts, info.task)


def begin(head: GroupHead) -> list[Frame]:
    """Encode the beginning of a group's file, up to the end of the head."""
    encoded = msgspec.msgpack.encode(head)
    return [_list_start(2), _bytes_start(len(encoded) + 4), struct.pack(">I", zlib.crc32(encoded)), encoded]


def digest_of(parts: Iterable[Frame]) -> str:
    """Return the digest of the parts of a file after its head."""
    state = hasher()
    for part in parts:
        state.update(part)
    return XXH3 + state.hexdigest()


PREFIX_BYTES = 6  # bytes of a group's file before its head


def head_size(prefix: bytes) -> int:
    """Return the size of the head from the first PREFIX_BYTES of a file. Raise DamagedError."""
    if len(prefix) < PREFIX_BYTES or prefix[:2] != _list_start(2) + b"\xc6":
        raise DamagedError("it does not begin like a group's file")
    return int.from_bytes(prefix[2:PREFIX_BYTES], "big")


def decode_head(data: Frame) -> GroupHead:
    """Decode a head. Raise DamagedError."""
    if len(data) < 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise DamagedError("its head is damaged")
    return decode_msgpack(data[4:], GroupHead)


def traces_of(rollout: Sequence[Rollout]) -> list[tuple[Rollout, ...]]:
    return [tuple(trace) for _, trace in groupby(rollout, key=lambda sequence: sequence.info.trace)]


def _list_start(count: int) -> bytes:
    """Return msgpack's beginning of a list."""
    return bytes([0x90 | count]) if count < 16 else struct.pack(">BI", 0xDD, count)


def _bytes_start(size: int) -> bytes:
    """Return msgpack's beginning of bytes."""
    return struct.pack(">BI", 0xC6, size)


def _mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else sum(values) / len(values)


def _slim(sequence: Rollout) -> Rollout:
    copies = {name: array.copy() for name, array in sequence.arrays.items() if name != "routed_experts"}
    return Rollout(sequence.info, **copies)


def _without_older(sequence: Rollout, version: int) -> Rollout:
    mask = sequence.mask & (sequence.versions >= version)
    return sequence if bool((mask == sequence.mask).all()) else replace(sequence, mask=mask)


def _cut(sequence: Rollout, seq_len: int) -> Rollout:
    mask = sequence.mask[:seq_len].copy()
    mask[:1] = False
    if len(sequence.mask) <= seq_len:
        return replace(sequence, mask=mask)
    length, images = whole(sequence.info.images, seq_len)
    arrays = {name: array[:length] for name, array in sequence.arrays.items()} | {"mask": mask[:length]}
    return replace(sequence, info=msgspec.structs.replace(sequence.info, images=images), **arrays)
