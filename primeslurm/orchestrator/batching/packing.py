"""Packs documents into rows, and encodes the rows of each rank as frames. Pure, and deterministic.

First-fit decreasing finds the number of rows. Every rank gets the same number, because all ranks compute in step. Where
rows may differ in length, documents are then spread over all rows, so that no rank computes a full row beside empty
ones.

Routed experts are most of a large batch, and are not copied: their frames are views of the rollouts' arrays, or ranges
of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import BatchInfo, batch_header, cp_range
from primeslurm.wire.batches.file_ranges import FrameSource, StoredArray
from primeslurm.wire.batches.frames import ArraySpec, Bool, Float32, Int32
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import DamagedError

# In a document of this many tokens, attention costs as much as everything else. With n active parameters, l layers and
# h heads of size d, that is n / (l * h * d): 17,000 for Qwen3-30B-A3B, 28,000 for Qwen3-235B-A22B, 51,000 for Kimi-K2.
# Sparse attention costs almost nothing; the cost of long rows is overestimated then.
ATTENTION_TOKENS = 32_768
# Rows that are not joined are 1/8, 2/8, ... of seq_len long. Few shapes keep kernel caches and CUDA's allocator small.
LENGTHS = 8
# Bytes of the routed experts of tokens for which the engines reported none
UNKNOWN = memoryview(b"\xff" * (1 << 20))


@dataclass(frozen=True)
class Document:
    """One sequence to train on. All arrays have shape [tokens], routed experts [tokens, layers, top_k]."""

    token_ids: Int32
    mask: Bool
    logprobs: Float32
    advantages: Float32
    on_policy: bool
    # Weight of each token's cross-entropy loss. None: 0 everywhere.
    cross_entropy: Float32 | None = field(default=None, kw_only=True)
    routed_experts: RoutedExperts | StoredArray | None = field(default=None, kw_only=True)
    ref_logprobs: Float32 | None = field(default=None, kw_only=True)
    images: tuple[ImageSpan, ...] = field(default=(), kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)  # Sampling temperature. None: that of the batch.

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PrefixTree:
    """Documents that begin with the same tokens: their prefix, and then the rest of each, which is a branch."""

    documents: tuple[Document, ...]
    prefix: int  # number of tokens that the documents share, below the length of each

    def __len__(self) -> int:
        return self.prefix + sum(len(document) - self.prefix for document in self.documents)


@dataclass(frozen=True)
class Segment:
    """Tokens of a document, or padding if `document` is None."""

    document: Document | None
    start: int
    end: int
    branch: int = 0  # as in `Row.branches`

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class PackedRow:
    """The documents of a row, one after another. The rest of `length` is padding."""

    documents: tuple[Document | PrefixTree, ...]
    length: int

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of the documents, and of the padding if there is any."""
        lengths = [len(document) for document in self.documents]
        padding = self.length - sum(lengths)
        return [*lengths, padding] if padding else lengths

    def segments(self) -> Iterator[Segment]:
        """Yield the documents in the order of their tokens; of a tree, its prefix and branches. The last is padding."""
        for each in self.documents:
            if isinstance(each, PrefixTree):
                yield Segment(each.documents[0], 0, each.prefix)
                for number, document in enumerate(each.documents, 1):
                    yield Segment(document, each.prefix, len(document), number)
            else:
                yield Segment(each, 0, len(each))
        yield Segment(None, 0, self.length - sum(map(len, self.documents)))

    def placed(self) -> Iterator[tuple[int, Segment]]:
        """Return the segments with the position of their first token in the row."""
        segments = list(self.segments())
        return zip(accumulate(map(len, segments), initial=0), segments, strict=False)


class RowLengths(NamedTuple):
    """The lengths that rows may have."""

    longest: int
    multiple: int | None  # The number that all lengths are multiples of. None: all rows have the same length.

    @classmethod
    def of(cls, recipe: Recipe) -> RowLengths:
        """Return the lengths of a recipe's rows. Rows that may differ in length are micro batches."""
        seq_len, trainer = recipe.seq_len, recipe.trainer
        if (joined := trainer.joined_rows(seq_len)) > 1:
            return cls(joined * seq_len, seq_len)
        # Compiled layers are compiled for one length, and rows that share a micro batch are stacked. Ranks that share a
        # row cut it into equal pieces.
        fixed = trainer.compile or trainer.rows_at_once(seq_len) > 1 or seq_len % (LENGTHS * trainer.parallelism.cp)
        return cls(seq_len, None if fixed else seq_len // LENGTHS)


def row_cost(lengths: Sequence[int]) -> float:
    """Return the cost of a row with these documents, in tokens without attention. Attention is within a document."""
    return sum(length * (1 + length / ATTENTION_TOKENS) for length in lengths)


def cost(of: Document | PrefixTree) -> float:
    """Return the cost of a document or tree, as in `row_cost`."""
    if isinstance(of, Document):
        return row_cost([len(of)])
    squares = sum(len(document) ** 2 - of.prefix**2 for document in of.documents) + of.prefix**2
    return len(of) + squares / ATTENTION_TOKENS


def pack(docs: Sequence[Document | PrefixTree], lengths: RowLengths, ranks: int) -> list[list[PackedRow]]:
    """Pack documents into equally many rows for each rank, the most expensive first."""
    sizes, of_each, (longest, multiple) = [len(doc) for doc in docs], [cost(doc) for doc in docs], lengths
    bins = _fit(sizes, longest)
    per_rank = max(1, -(-len(bins) // ranks))
    if multiple is not None:
        bins = _spread(sizes, of_each, longest, per_rank * ranks) or bins
    costs = [sum(of_each[i] for i in members) for members in bins]

    def row(members: Sequence[int]) -> PackedRow:
        used = sum(sizes[i] for i in members)
        length = longest if multiple is None else max(1, -(-used // multiple)) * multiple
        return PackedRow(tuple(docs[i] for i in members), length)

    dealt = _deal(costs, ranks, per_rank)
    return [[row(bins[b]) for b in of_rank] + [row([])] * (per_rank - len(of_rank)) for of_rank in dealt]


def _fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _decreasing(lengths):
        target = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if target is None:
            target = len(bins)
            bins.append([])
            room.append(capacity)
        bins[target].append(index)
        room[target] -= lengths[index]
    return bins


def _spread(lengths: Sequence[int], costs: Sequence[float], capacity: int, rows: int) -> list[list[int]] | None:
    """Put each document, the longest first, into the cheapest row with room. None: one does not fit anywhere."""
    bins: list[list[int]] = [[] for _ in range(rows)]
    room, totals = [capacity] * rows, [0.0] * rows
    for index in _decreasing(lengths):
        fitting = [b for b in range(rows) if room[b] >= lengths[index]]
        if not fitting:
            return None
        target = min(fitting, key=totals.__getitem__)
        bins[target].append(index)
        room[target] -= lengths[index]
        totals[target] += costs[index]
    return bins


def _deal(costs: Sequence[float], ranks: int, per_rank: int) -> list[list[int]]:
    """Deal rows to ranks round by round. In a round, the most expensive row goes to the rank with the least cost."""
    # All ranks wait for the slowest in each micro batch, so the rows of a round cost about the same.
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    order = _decreasing(costs)
    for start in range(0, len(order), ranks):
        cheapest = sorted(range(ranks), key=totals.__getitem__)
        for index, rank in zip(order[start : start + ranks], cheapest, strict=False):
            dealt[rank].append(index)
            totals[rank] += costs[index]
    return dealt


def _decreasing(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@dataclass(frozen=True)
class Common:
    """Properties of all rows of a batch."""

    temperature: float  # Sampling temperature of documents without their own
    has_cross_entropy: bool
    has_ref_logprobs: bool
    # Any array of routed experts, for dtype and shape. None: there are none.
    routed: RoutedExperts | StoredArray | None
    has_branches: bool = False

    @classmethod
    def of(cls, docs: Sequence[Document], temperature: float, *, has_branches: bool = False) -> Common:
        return cls(
            temperature,
            any(doc.cross_entropy is not None for doc in docs),
            any(doc.ref_logprobs is not None for doc in docs),
            next((doc.routed_experts for doc in docs if doc.routed_experts is not None), None),
            has_branches,
        )


def encode(rows: Sequence[PackedRow], info: BatchInfo, common: Common) -> list[FrameSource]:
    """Encode the shard of the context-parallel rank in `info`: a header, and the bytes of the arrays.

    Raise DamagedError if routed experts have the length or shape of another sequence or model, and ValueError if rows
    cannot be cut into equal pieces.
    """
    if odd := [row.length for row in rows if row.length % info.cp_world]:
        raise ValueError(f"{info.cp_world} ranks cannot share rows of {odd[0]} tokens")
    segments = [segment for row in rows for segment in _segments(row, info)]
    arrays = _arrays(segments, common)
    if common.has_branches:
        numbers = [segment.branch for segment in segments]
        arrays["branches"] = np.repeat(np.array(numbers, np.int32), [len(segment) for segment in segments])
    specs = [ArraySpec(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    frames: list[FrameSource] = [array.view(np.uint8).data for array in arrays.values()]
    if (like := common.routed) is not None:
        specs.append(ArraySpec("routed_experts", like.dtype.str, (sum(map(len, segments)), *like.shape[1:])))
        frames += [frame for segment in segments for frame in _routed(segment, like)]
    images = []
    for row in rows:
        firsts = np.cumsum([0, *row.lengths])
        pairs = zip(firsts, row.documents, strict=False)
        alone = [(first, doc) for first, doc in pairs if isinstance(doc, Document)]
        images.append(tuple(image.moved(first) for first, doc in alone for image in doc.images))
    return [batch_header(info, [(row.lengths, i) for row, i in zip(rows, images, strict=True)], specs), *frames]


def _segments(row: PackedRow, info: BatchInfo) -> Iterator[Segment]:
    """Cut out the piece of a row that a context-parallel rank gets."""
    start, end = cp_range(row.length, info.cp_rank, info.cp_world)
    for first, whole in row.placed():
        a, b = max(start - first, 0), min(end - first, len(whole))
        if a < b:
            yield Segment(whole.document, whole.start + a, whole.start + b, whole.branch)


def _arrays(segments: Sequence[Segment], common: Common) -> dict[str, NDArray[Any]]:

    def joined(of: Callable[[Document], NDArray[Any] | None], dtype: type[np.generic]) -> NDArray[Any]:
        pairs = [(segment, None if segment.document is None else of(segment.document)) for segment in segments]
        return np.concatenate(
            [np.zeros(len(one), dtype) if array is None else array[one.start : one.end] for one, array in pairs],
            dtype=dtype,
            casting="same_kind",
        )

    def repeated(of: Callable[[Document], Any], padding: Any, dtype: type[np.generic]) -> NDArray[Any]:
        values = [padding if segment.document is None else of(segment.document) for segment in segments]
        return np.repeat(np.array(values, dtype), [len(segment) for segment in segments])

    weights = joined(lambda doc: doc.cross_entropy, np.float32)
    default = common.temperature
    temperatures = repeated(lambda doc: default if doc.temperature is None else doc.temperature, default, np.float32)
    arrays = {
        "token_ids": joined(lambda doc: doc.token_ids, np.int32),
        "mask": joined(lambda doc: doc.mask, np.bool_),
        "logprobs": joined(lambda doc: doc.logprobs, np.float32),
        "advantages": joined(lambda doc: doc.advantages, np.float32),
        # Cross-entropy is always computed at temperature 1, the policy itself.
        "temperatures": np.where(weights > 0, np.float32(1), temperatures),
        "on_policy": repeated(lambda doc: doc.on_policy, False, np.bool_),
    }
    if common.has_cross_entropy:
        arrays["echo_weights"] = weights
    if common.has_ref_logprobs:
        arrays["ref_logprobs"] = joined(lambda doc: doc.ref_logprobs, np.float32)
    return arrays


def _routed(segment: Segment, like: RoutedExperts | StoredArray) -> Iterator[FrameSource]:
    array = None if segment.document is None else segment.document.routed_experts
    if array is None:
        missing = len(segment) * math.prod(like.shape[1:]) * like.dtype.itemsize
        for start in range(0, missing, len(UNKNOWN)):
            yield UNKNOWN[: min(len(UNKNOWN), missing - start)]
        return
    length = len(segment.document or ())
    if array.shape != (length, *like.shape[1:]) or array.dtype != like.dtype:
        raise DamagedError(f"routed experts are {array.dtype}{array.shape}, not {(length, *like.shape[1:])}")
    if isinstance(array, StoredArray):
        yield array.rows(segment.start, segment.end).content
        return
    rows: NDArray[Any] = np.ascontiguousarray(array[segment.start : segment.end])
    yield rows.reshape(-1).view(np.uint8).data
