"""Rollouts and batches: arrays with one entry per token, aligned with `token_ids`.

Entry i of every array describes token i itself: `mask[i]` = this token was sampled by the policy and is trained on,
`logprobs[i]` = the engine's log-probability of having sampled it, `versions[i]` = the policy version that sampled it
(-1 where it was not sampled). A trainer shifts: the logits at i-1 predict token i. A document's first token is never
trained.

On the wire a message is `[header, buffer, buffer, ...]`: one msgpack header, which names each array's dtype and shape
in the order of the buffers, and the raw buffers beside it, without copies on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.batches.array_checks import LARGEST_AXIS, ArraySpec, array, mismatch
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import Count, DamagedError, value

T = TypeVar("T")
Frame = bytes | memoryview
Arrays = dict[str, NDArray[Any]]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""What advantages are made of has to fit into the type that they have."""
LEAST_LOGPROB = -40.0
"""Least log-probability that an engine can give a token it sampled. With a vocabulary of 200,000 (e^12.2) tokens, a
token below it comes up less than once in 10^12 tokens, so a lower value is an error. vLLM sends -9999 for NaN and -inf.
"""
MOST_LOGPROB = 0.01
"""Largest log-probability that an engine can give a token; above 0 because engines round."""
MOST_METRICS = 1000
"""Of a rollout. Each makes a column of the run's metrics."""


class ImageSpan(msgspec.Struct, frozen=True):
    """An image in a sequence of tokens. Who trains on it decodes it."""

    source: str
    """Path of a file, or a data URI."""
    start: Count
    """Index of the first of the tokens that stand for it."""
    end: Count
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

    token_ids: list[Count]
    replaces: Count
    """Number of the sequence's own tokens that it stands for."""


class RolloutInfo(msgspec.Struct, frozen=True):
    """Everything about a rollout but its tokens."""

    id: str
    group: str
    environment: str
    opened_version: Count
    """Policy version when the rollout's group opened; staleness counts from here."""
    reward: float
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)] = {}
    turns: Count = 1
    finish_reason: str = "stop"
    seconds: float = 0.0
    error: str | None = None
    """Set if the rollout failed; it is then never trained on."""
    images: tuple[ImageSpan, ...] = ()
    """Its images, in order."""
    agent: str = ""
    """Which of its environment's agents it is of; empty if a release wrote it that knew but one."""
    trace: Count = 0
    """Which trace of its rollout it is of: an environment of several agents has one for each time an agent acted."""
    length_penalty: float = 0.0
    """What is taken off the reward before advantages are made of it."""
    teacher_prompt: TeacherPrompt | None = None
    """None: the teacher is given what the policy was given."""
    repeated_experts: Count = 0
    """Tokens whose routed experts repeated, so that they are unknown."""

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

    @property
    def arrays(self) -> dict[str, Any]:
        """Return the arrays there are, by name."""
        found = ((spec.name, getattr(self, spec.name)) for spec in fields(self) if spec.name != "info")
        return {name: array for name, array in found if array is not None}

    def encode(self) -> list[Frame]:
        """Encode it as wire frames: one buffer per array there is."""
        return to_frames(self.info, self.arrays)

    @classmethod
    def decode(cls, message: Sequence[Any]) -> Rollout:
        """Decode it from wire frames.

        Raises:
            DamagedError: they are not those of a rollout that can be trained on.
        """
        info, arrays = from_frames(message, RolloutInfo)
        if why := _not_a_rollout(info, arrays):
            raise DamagedError(why)
        return cls(info, **arrays)

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version that sampled a token of it (its opened version if none did)."""
        return self.info.opened_version if (span := self._sampled_by) is None else span[0]

    @property
    def is_mixed(self) -> bool:
        """Tell whether tokens of more than one policy version are in it."""
        return (span := self._sampled_by) is not None and span[0] != span[1]

    @property
    def _sampled_by(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version that sampled a token of it; None if none did."""
        newest = int(self.versions.max(initial=-1))
        # without a copy of a million tokens: -1 without its sign is above all versions
        return None if newest < 0 else (int(self.versions.view(f"u{self.versions.itemsize}").min()), newest)


@dataclass(frozen=True)
class Row:
    """One packed row, or one of equally long pieces of it that context-parallel ranks share.

    `positions` are always those of the whole row: they restart at 0 where a document starts, and padding is a document
    of its own. Other arrays are those of the piece, and of the one token after it, which its last token predicts.
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
    """[tokens, layers, top_k]; None unless the trainer replays them. All rows of a batch have them, or none."""
    ref_logprobs: Float32 | None = None
    """The teacher's log-probabilities of the trained tokens. None without a teacher."""
    images: tuple[ImageSpan, ...] = ()
    """The whole row's images, in order."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that it has, by name."""
        found = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "images"}
        return {name: array for name, array in found.items() if array is not None}

    def piece(self, rank: int, ranks: int) -> Row:
        """Cut a whole row to one of `ranks` pieces. Arrays are views."""
        start, end = piece(len(self.positions), rank, ranks)
        cut: Any = {name: array[start:end] for name, array in self.arrays().items() if name != "positions"}
        return replace(self, **cut)


def piece(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a row's piece starts and ends, with the token after it, if there is one. `ranks` divide `length`."""
    whole = length // ranks
    return rank * whole, min((rank + 1) * whole + 1, length)


def stack(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """Stack each array of some rows to one [rows, tokens, ...], by name. That of a single row is not copied."""
    if len(rows) == 1:
        return {name: array[None] for name, array in rows[0].arrays().items()}
    return {name: np.stack([getattr(row, name) for row in rows]) for name in rows[0].arrays()}


class RankShard(msgspec.Struct, frozen=True):
    """What a rank trains of a batch: a data-parallel rank's rows, and of each a context-parallel rank's piece."""

    dp_rank: int
    dp_world: int
    cp_rank: int = 0
    cp_world: int = 1


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
    cp_rank: int = 0
    """Which piece of each row these are, of `cp_world`."""
    cp_world: int = 1
    rows_at_once: int = 0
    """Rows of a micro batch. 0: as many as fit, and all rows are equally long."""

    @property
    def shard(self) -> RankShard:
        """Return whose the rows are."""
        return RankShard(self.dp_rank, self.dp_world, self.cp_rank, self.cp_world)


class _RowHeader(msgspec.Struct, frozen=True):
    """What is sent of a row beside arrays."""

    documents: list[Count]
    """Lengths of its documents: they say its positions."""
    images: tuple[ImageSpan, ...] = ()


class _Header(msgspec.Struct, frozen=True):
    """What is sent of a batch beside arrays."""

    info: BatchInfo
    rows: list[_RowHeader]


@dataclass(frozen=True)
class Batch:
    """What one rank trains in one step: rows of its data-parallel share, or its pieces of them.

    Every rank has the same number of rows. Those of different shares may differ in length.
    """

    info: BatchInfo
    rows: list[Row] = field(default_factory=list)

    def encode(self) -> list[Frame]:
        """Encode it as wire frames: one array per field, all rows one after another."""
        names = [name for name in self.rows[0].arrays() if name != "positions"]
        arrays = {name: np.concatenate([getattr(row, name) for row in self.rows]) for name in names}
        rows = [(lengths_of(row.positions), row.images) for row in self.rows]
        specs = [ArraySpec(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        return [batch_header(self.info, rows, specs), *(_bytes_of(array) for array in arrays.values())]

    @classmethod
    def decode(cls, message: Sequence[Any]) -> Batch:
        """Decode it from wire frames. Arrays are views of them, but for positions.

        Raises:
            DamagedError: they are not those of a batch.
        """
        header, arrays = from_frames(message, _Header)
        if why := _not_a_batch(header, arrays):
            raise DamagedError(why)
        info, start, rows = header.info, 0, []
        for row in header.rows:
            first, last = piece(sum(row.documents), info.cp_rank, info.cp_world)
            end = start + last - first
            mine = {name: array[start:end] for name, array in arrays.items()}
            rows.append(Row(positions=positions_of(row.documents), images=row.images, **mine))
            start = end
        return cls(info, rows)

    def piece(self, rank: int, ranks: int) -> Batch:
        """Cut whole rows to the pieces of one of `ranks` that share them. Pieces are returned as they are.

        Raises:
            ValueError: they are the pieces of another rank.
        """
        if (self.info.cp_rank, self.info.cp_world) == (rank, ranks):
            return self
        if self.info.cp_world > 1:
            raise ValueError(
                f"rows cut for rank {self.info.cp_rank} of {self.info.cp_world}, where {rank} of {ranks} trains"
            )
        info = msgspec.structs.replace(self.info, cp_rank=rank, cp_world=ranks)
        return Batch(info, [row.piece(rank, ranks) for row in self.rows])


def batch_header(
    info: BatchInfo, rows: Sequence[tuple[Sequence[int], tuple[ImageSpan, ...]]], specs: Sequence[ArraySpec]
) -> bytes:
    """Encode the first frame of a batch; the arrays' bytes follow.

    Args:
        info: of the batch.
        rows: lengths of the documents, and images, of each.
        specs: of the arrays, each of all rows one after another.
    """
    meta = _Header(info, [_RowHeader(list(documents), images) for documents, images in rows])
    return msgspec.msgpack.encode(_ArraysHeader(msgspec.Raw(msgspec.msgpack.encode(meta)), tuple(specs)))


def lengths_of(positions: Int32) -> list[int]:
    """Lengths of a row's documents."""
    starts = np.flatnonzero(positions == 0)
    return [int(length) for length in np.diff(starts, append=len(positions))]


def positions_of(documents: Sequence[int]) -> Int32:
    """Positions of a row of documents of these lengths."""
    positions, start = np.empty(sum(documents), np.int32), 0
    for length in documents:
        positions[start : start + length] = np.arange(length, dtype=np.int32)
        start += length
    return positions


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
    return [msgspec.msgpack.encode(header), *(_bytes_of(array) for array in contiguous.values())]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class IncomingArrays:
    """The arrays of a message whose bytes come part by part.

    Args:
        header: its first frame.
        empty: makes room for so many bytes.
        most: bytes that there may be.

    Raises:
        DamagedError: the header is damaged, or states more bytes than `most`.
    """

    def __init__(self, header: Any, empty: Callable[[int], NDArray[np.uint8]], most: int) -> None:
        # dtypes are "<f4" and the like
        sizes = [math.prod(spec.shape) * int(spec.dtype[2:]) for spec in value(header, _ArraysHeader).arrays]
        if sum(sizes) > most:
            raise DamagedError(f"{sum(sizes)} bytes are announced, of at most {most}")
        self._header = header
        self.size = sum(sizes)
        self.received = 0
        try:
            self._buffers = [empty(size) for size in sizes]
        except MemoryError as error:
            raise DamagedError(f"there is no memory for {self.size} bytes") from error
        self._room = [buffer for buffer in self._buffers if len(buffer)]

    @property
    def places(self) -> list[NDArray[np.uint8]]:
        """Return where each array's bytes belong, for who puts them there himself."""
        return self._buffers

    def take(self, parts: Sequence[Any]) -> None:
        """Put the next bytes in their places.

        Raises:
            DamagedError: they are more than were announced.
        """
        for part in parts:
            rest = np.frombuffer(part, np.uint8)
            while len(rest):
                if not self._room:
                    raise DamagedError(f"more bytes than the {self.size} that were announced")
                room = self._room[0]
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
                self.received += count
                rest = rest[count:]
                self._room[:1] = [room[count:]] if count < len(room) else []

    def frames(self) -> list[Any]:
        """Return the whole message."""
        return [self._header, *self._buffers]


def from_frames(frames: Sequence[Any], kind: type[T]) -> tuple[T, Arrays]:
    """Decode what `to_frames` made. Arrays are read-only views of the frames.

    Args:
        frames: of one message.
        kind: type of `meta`.

    Raises:
        DamagedError: the frames do not match their header, or the header is damaged.
    """
    if not frames:
        raise DamagedError("a message without a header")
    header = value(frames[0], _ArraysHeader)
    if len(frames) != len(header.arrays) + 1:
        raise DamagedError(f"{len(frames) - 1} buffers, but the header names {len(header.arrays)}")
    arrays: Arrays = {}
    for spec, frame in zip(header.arrays, frames[1:], strict=True):
        if spec.name in arrays:
            raise DamagedError(f"two arrays {spec.name[:40]!r}")
        arrays[spec.name] = array(spec, frame)
    return value(header.meta, kind), arrays


def assembled(frames: Sequence[Any]) -> list[Any]:
    """Put a message together whose arrays' bytes are cut into frames as it suits.

    Raises:
        DamagedError: they are not the bytes that the header announces.
    """
    incoming = IncomingArrays(frames[0], lambda size: np.empty(size, np.uint8), sum(len(frame) for frame in frames[1:]))
    incoming.take(frames[1:])
    return incoming.frames()


def _not_a_rollout(info: RolloutInfo, arrays: Arrays) -> str:
    """Say why arrays are not those of a rollout; "" if they are."""
    if not (abs(info.reward) <= LARGEST_REWARD and abs(info.length_penalty) <= LARGEST_REWARD):
        return f"a reward of {info.reward}, less {info.length_penalty}"
    length = len(arrays.get("token_ids", ()))
    if not length:
        return "no tokens"
    if why := mismatch(Rollout, arrays, (length,)):
        return why
    end = 0
    for image in info.images:
        if not end <= image.start < image.end <= length:
            return f"an image at {image.start} to {image.end} of {length} tokens, after {end}"
        end = image.end
    prompt = info.teacher_prompt
    if prompt is not None and prompt.replaces > length:
        return "a teacher's prompt that does not fit"
    for name in ("logprobs", "ref_logprobs"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            return f"{name} that are no numbers"
    return ""


def _not_a_batch(header: _Header, arrays: Arrays) -> str:
    """Say why arrays are not those of a batch; "" if they are."""
    info, tokens = header.info, arrays.get("token_ids")
    if not 0 <= info.dp_rank < info.dp_world:
        return f"rank {info.dp_rank} of {info.dp_world}"
    if not 0 <= info.cp_rank < info.cp_world <= LARGEST_AXIS:
        return f"piece {info.cp_rank} of {info.cp_world}"
    lengths = [sum(row.documents) for row in header.rows]
    if not lengths or min(lengths) <= 0 or any(length % info.cp_world for length in lengths):
        return f"rows without tokens, or without {info.cp_world} equal pieces"
    pieces = [piece(length, info.cp_rank, info.cp_world) for length in lengths]
    if tokens is None or tokens.shape != (sum(end - start for start, end in pieces),):
        return "not as many tokens as it says"
    return mismatch(Row, arrays, tokens.shape, without="positions")
