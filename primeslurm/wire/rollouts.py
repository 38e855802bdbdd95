"""Rollouts and batches: arrays with one entry per token, aligned with `token_ids`.

Entry i of every array describes token i itself: `mask[i]` = this token was sampled by the policy and is trained on,
`logprobs[i]` = the engine's log-probability of having sampled it, `versions[i]` = the policy version that sampled it
(-1 where it was not sampled). A trainer shifts: the logits at i-1 predict token i. A document's first token is never
trained.

On the wire a message is `[header, buffer, buffer, ...]`: one msgpack header, which names each array's dtype and shape
in the order of the buffers, and the raw buffers beside it, without copies on the way in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.routed_experts import RoutedExperts

T = TypeVar("T")
Frame = bytes | memoryview
Arrays = dict[str, NDArray[Any]]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


class ImageSpan(msgspec.Struct, frozen=True):
    """An image in a sequence of tokens. Who trains on it decodes it."""

    source: str
    """Path of a file, or a data URI."""
    start: int
    """Index of the first of the tokens that stand for it."""
    end: int
    """Index of the token after the last of them."""
    sha256: str | None = None
    """Of the encoded image, in hex. None if nobody has read it yet."""

    def moved(self, by: int) -> ImageSpan:
        """Return the same image, `by` tokens further on."""
        return msgspec.structs.replace(self, start=self.start + int(by), end=self.end + int(by))


def whole(images: Sequence[ImageSpan], length: int) -> tuple[int, tuple[ImageSpan, ...]]:
    """Find where a sequence has to end so that no image is cut.

    Args:
        images: of the sequence, in order.
        length: longest end [tokens].

    Returns:
        The end [tokens], and the images before it.
    """
    for image in images:
        if image.start < length < image.end:
            length = image.start
    return length, tuple(image for image in images if image.end <= length)


class TeacherPrompt(msgspec.Struct, frozen=True):
    """What a teacher is given in place of a sequence's first tokens."""

    token_ids: list[int]
    replaces: int
    """Number of the sequence's own tokens that it stands for."""


class RolloutInfo(msgspec.Struct, frozen=True):
    """Everything about a rollout but its tokens."""

    id: str
    group: str
    environment: str
    opened_version: int
    """Policy version when the rollout's group opened; staleness counts from here."""
    reward: float
    metrics: dict[str, float] = {}
    turns: int = 1
    finish_reason: str = "stop"
    seconds: float = 0.0
    error: str | None = None
    """Set if the rollout failed; it is then never trained on."""
    images: tuple[ImageSpan, ...] = ()
    """Its images, in order."""
    agent: str = ""
    """Which of its environment's agents it is of; empty if a release wrote it that knew but one."""
    trace: int = 0
    """Which trace of its rollout it is of: an environment of several agents has one for each time an agent acted."""
    length_penalty: float = 0.0
    """What is taken off the reward before advantages are made of it."""
    teacher_prompt: TeacherPrompt | None = None
    """None: the teacher is given what the policy was given."""

    @property
    def net_reward(self) -> float:
        """Return the reward less the length penalty: what advantages are made of."""
        return self.reward - self.length_penalty


@dataclass(frozen=True)
class Rollout:
    """One finished rollout. All arrays have shape [n_tokens], routed experts [n_tokens, layers, top_k]."""

    info: RolloutInfo
    token_ids: Int32
    mask: Bool
    logprobs: Float32
    versions: Int32
    observed: Bool | None = field(default=None, kw_only=True)
    """Tokens that the environment answered after the policy's first ones; None unless they are trained too."""
    routed_experts: RoutedExperts | None = field(default=None, kw_only=True)
    """None unless the trainer replays them."""
    ref_logprobs: Float32 | None = field(default=None, kw_only=True)
    """The teacher's log-probabilities of the sampled tokens, 0 elsewhere; None until it was asked."""

    def encode(self) -> list[Frame]:
        """Encode it as wire frames: one buffer per array there is."""
        found = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "info"}
        return to_frames(self.info, {name: array for name, array in found.items() if array is not None})

    @classmethod
    def decode(cls, message: Sequence[Any]) -> Rollout:
        """Decode it from wire frames.

        Raises:
            ValueError: the frames do not match their header.
            msgspec.MsgspecError: the header is damaged.
        """
        info, arrays = from_frames(message, RolloutInfo)
        return cls(info, **arrays)

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version that sampled a token of it (its opened version if none did)."""
        sampled = self.versions[self.versions >= 0]
        return int(sampled.min()) if sampled.size else self.info.opened_version

    @property
    def is_mixed(self) -> bool:
        """Tell whether tokens of more than one policy version are in it."""
        sampled = self.versions[self.versions >= 0]
        return bool(sampled.size) and bool(sampled.min() != sampled.max())


@dataclass(frozen=True)
class Row:
    """One packed row of exactly seq_len tokens.

    `positions` restart at 0 where a document starts; padding is a document of its own.
    """

    token_ids: Int32
    positions: Int32
    mask: Bool
    logprobs: Float32
    advantages: Float32
    temperatures: Float32
    on_policy: Bool
    """Of a rollout that the policy being trained sampled from its first token to its last: here, trainer and engine
    logprobs must agree."""
    echo_weights: Float32 | None = None
    """Factor of the cross-entropy on tokens that are trained by it, 0 elsewhere, such that it is right when the sum of
    all losses is divided by `loss_tokens`. None unless there are such tokens in the batch."""
    routed_experts: RoutedExperts | None = None
    """[seq_len, layers, top_k]; None unless the trainer replays them. All rows of a batch have them, or none."""
    ref_logprobs: Float32 | None = None
    """The teacher's log-probabilities of the trained tokens. None without a teacher."""
    images: tuple[ImageSpan, ...] = ()
    """Its images, in order."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that it has, by name."""
        found = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "images"}
        return {name: array for name, array in found.items() if array is not None}


def stack(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """Stack each array of some rows to one [rows, seq_len, ...], by name."""
    return {name: np.stack([getattr(row, name) for row in rows]) for name in rows[0].arrays()}


class BatchInfo(msgspec.Struct, frozen=True):
    """What a data-parallel rank must know about a batch."""

    step: int
    dp_rank: int
    dp_world: int
    loss_tokens: int
    """Sampled tokens that are trained, in the whole batch over all ranks: the loss is normalised by this."""
    max_steps: int = 0
    has_images: bool = False
    """Whether any row of the whole batch has images, over all ranks."""


class _Header(msgspec.Struct, frozen=True):
    """What is sent of a batch beside arrays."""

    info: BatchInfo
    images: list[tuple[ImageSpan, ...]]
    """Of each row."""


@dataclass(frozen=True)
class Batch:
    """The rows of one data-parallel rank for one step. Every rank has the same number of rows."""

    info: BatchInfo
    rows: list[Row] = field(default_factory=list)

    def encode(self) -> list[Frame]:
        """Encode it as wire frames: one stacked [rows, seq_len, ...] array per field."""
        return to_frames(_Header(self.info, [row.images for row in self.rows]), stack(self.rows))

    @classmethod
    def decode(cls, message: Sequence[Any]) -> Batch:
        """Decode it from wire frames. Raises as `Rollout.decode`."""
        header, arrays = from_frames(message, _Header)
        images = enumerate(header.images)
        return cls(
            header.info, [Row(**{name: array[i] for name, array in arrays.items()}, images=p) for i, p in images]
        )


class ArraySpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _ArraysHeader(msgspec.Struct, frozen=True):
    meta: msgspec.Raw
    arrays: tuple[ArraySpec, ...]


def to_frames(meta: Any, arrays: Mapping[str, NDArray[Any]] = {}) -> list[Frame]:
    """Encode `meta` and named arrays as frames, ready for `send_multipart(copy=False)`.

    Args:
        meta: anything that msgspec encodes.
        arrays: by name; a contiguous one is not copied.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = tuple(ArraySpec(name, array.dtype.str, array.shape) for name, array in contiguous.items())
    header = _ArraysHeader(msgspec.Raw(msgspec.msgpack.encode(meta)), specs)
    buffers = [array.reshape(-1).view(np.uint8).data for array in contiguous.values()]
    return [msgspec.msgpack.encode(header), *buffers]


def from_frames(frames: Sequence[Any], kind: type[T]) -> tuple[T, Arrays]:
    """Decode what `to_frames` made. Arrays are read-only views of the frames.

    Args:
        frames: of one message.
        kind: type of `meta`.

    Raises:
        ValueError: the frames do not match their header.
    """
    header = msgspec.msgpack.decode(frames[0], type=_ArraysHeader)
    if len(frames) != len(header.arrays) + 1:
        raise ValueError(f"{len(frames) - 1} buffers, but the header names {len(header.arrays)}")
    arrays: Arrays = {}
    for spec, frame in zip(header.arrays, frames[1:], strict=True):
        arrays[spec.name] = np.frombuffer(frame, dtype=np.dtype(spec.dtype)).reshape(spec.shape)
    return msgspec.msgpack.decode(header.meta, type=kind), arrays
