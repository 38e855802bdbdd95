"""Documents into rows, and rows into what each rank gets of them, as frames. Pure; the same for the same input.

First fit decreasing says how many rows of seq_len there have to be. Every rank needs as many as every other, as all
compute in step; where rows may differ in length, documents are then spread over all of them, so that no rank computes a
full row beside others' empty ones.

Routed experts are nearly all of a large batch, and are not copied: their frames are views of the rollouts' own arrays,
or say where in a file they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import BatchInfo, batch_header, cp_range
from primeslurm.wire.batches.file_ranges import FrameSource, StoredArray
from primeslurm.wire.batches.frames import ArraySpec, Bool, Float32, Int32
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import DamagedError

ATTENTION_TOKENS = 32_768
"""In a document of so many tokens attention costs as much as all the rest. With n active parameters, l layers and h
heads of size d that is n / (l * h * d): 17,000 for Qwen3-30B-A3B, 28,000 for Qwen3-235B-A22B, 51,000 for Kimi-K2.
Sparse attention costs next to nothing; rows of long documents are then taken for dearer than they are."""
LENGTHS = 8
"""Rows are 1, 2, ... or so many parts of seq_len long: shapes are few, for caches of kernels and of the allocator."""
UNKNOWN = memoryview(b"\xff" * (1 << 20))
"""Routed experts of tokens that the engines said nothing of, as bytes."""


@dataclass(frozen=True)
class Document:
    """One sequence to train on. All arrays have shape [n_tokens], routed experts [n_tokens, layers, top_k]."""

    token_ids: Int32
    mask: Bool
    logprobs: Float32
    advantages: Float32
    on_policy: bool
    cross_entropy: Float32 | None = field(default=None, kw_only=True)
    """Above 0: the token is trained by cross-entropy times this. None: 0 everywhere."""
    routed_experts: RoutedExperts | StoredArray | None = field(default=None, kw_only=True)
    ref_logprobs: Float32 | None = field(default=None, kw_only=True)
    images: tuple[ImageSpan, ...] = field(default=(), kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)
    """Its tokens were sampled at. None: that of the batch."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PackedRow:
    """Which documents a row has, one after the other, and its length; what they leave is padding."""

    documents: tuple[Document, ...]
    length: int

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of its documents, and of the padding."""
        lengths = [len(document) for document in self.documents]
        padding = self.length - sum(lengths)
        return [*lengths, padding] if padding else lengths


def quantum(recipe: Recipe) -> int | None:
    """Return what the lengths of rows are multiples of. None: all rows have seq_len tokens.

    Whatever length a row has, all ranks that share it cut it into equal pieces. Compiled layers are compiled for one
    length. Rows of which several fit into a micro batch are stacked.
    """
    seq_len = recipe.seq_len
    if recipe.trainer.compile or recipe.trainer.rows_at_once(seq_len) > 1:
        return None
    if seq_len % (LENGTHS * recipe.trainer.parallelism.cp):
        return None
    return seq_len // LENGTHS


def cost(lengths: Sequence[int]) -> float:
    """What a row of such documents costs to train, in tokens without attention, which is causal and within each."""
    return sum(length * (1 + length / ATTENTION_TOKENS) for length in lengths)


def pack(docs: Sequence[Document], seq_len: int, ranks: int, quantum: int | None = None) -> list[list[PackedRow]]:
    """Pack documents into the rows of each rank.

    Args:
        docs: none longer than seq_len.
        seq_len: longest row [tokens].
        ranks: how many data-parallel ranks there are.
        quantum: of the lengths of rows. None: all have seq_len.

    Returns:
        For each rank its rows, as many as every other has, from the dearest to the cheapest; where documents do not
        suffice, empty ones.
    """
    lengths = [len(doc) for doc in docs]
    bins = _fit(lengths, seq_len)
    per_rank = max(1, -(-len(bins) // ranks))
    if quantum is not None:
        bins = _spread(lengths, seq_len, per_rank * ranks) or bins
    costs = [cost([lengths[i] for i in members]) for members in bins]

    def row(members: Sequence[int]) -> PackedRow:
        used = sum(lengths[i] for i in members)
        length = seq_len if quantum is None else max(1, -(-used // quantum)) * quantum
        return PackedRow(tuple(docs[i] for i in members), length)

    return [[row(bins[b]) for b in mine] + [row([])] * (per_rank - len(mine)) for mine in _deal(costs, ranks, per_rank)]


def _fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit decreasing."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _decreasing(lengths):
        length = lengths[index]
        target = next((b for b, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([])
            room.append(capacity)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= length
    return bins


def _spread(lengths: Sequence[int], capacity: int, rows: int) -> list[list[int]] | None:
    """Spread documents over so many rows, the next longest to the cheapest that has room. None: one fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(rows)]
    room, costs = [capacity] * rows, [0.0] * rows
    for index in _decreasing(lengths):
        fitting = [b for b in range(rows) if room[b] >= lengths[index]]
        if not fitting:
            return None
        target = min(fitting, key=costs.__getitem__)
        bins[target].append(index)
        room[target] -= lengths[index]
        costs[target] += cost([lengths[index]])
    return bins


def _deal(costs: Sequence[float], ranks: int, per_rank: int) -> list[list[int]]:
    """Deal rows round by round, the dearest of a round to the rank that has the least yet.

    All ranks wait for the slowest in each micro batch, so those of a round cost about the same, too.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    order = _decreasing(costs)
    for start in range(0, len(order), ranks):
        poorest = sorted(range(ranks), key=totals.__getitem__)
        for index, rank in zip(order[start : start + ranks], poorest, strict=False):
            dealt[rank].append(index)
            totals[rank] += costs[index]
    return dealt


def _decreasing(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@dataclass(frozen=True)
class Common:
    """What holds for all rows of a batch."""

    temperature: float
    """At which documents were sampled that name none."""
    echoed: bool
    referred: bool
    routed: RoutedExperts | StoredArray | None
    """Any array of the model's routed experts; None if there are none."""

    @classmethod
    def of(cls, docs: Sequence[Document], temperature: float) -> Common:
        """Look at the documents of a batch."""
        return cls(
            temperature,
            any(doc.cross_entropy is not None for doc in docs),
            any(doc.ref_logprobs is not None for doc in docs),
            next((doc.routed_experts for doc in docs if doc.routed_experts is not None), None),
        )


def encode(rows: Sequence[PackedRow], info: BatchInfo, common: Common) -> list[FrameSource]:
    """Encode what one rank gets.

    Args:
        rows: of its data-parallel share.
        info: says which piece of each is its own.
        common: to all rows of the batch.

    Returns:
        The header, and the bytes of the arrays, cut into parts as it suits.

    Raises:
        DamagedError: routed experts are of another length or of another model than others.
        ValueError: rows cannot be cut into so many equal pieces.
    """
    if odd := [row.length for row in rows if row.length % info.cp_world]:
        raise ValueError(f"{info.cp_world} ranks cannot share rows of {odd[0]} tokens")
    parts = [part for row in rows for part in _parts(row, info)]
    arrays = _arrays(parts, common)
    specs = [ArraySpec(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    frames: list[FrameSource] = [array.view(np.uint8).data for array in arrays.values()]
    if (like := common.routed) is not None:
        specs.append(ArraySpec("routed_experts", like.dtype.str, (sum(map(len, parts)), *like.shape[1:])))
        frames += [frame for part in parts for frame in _routed(part, like)]
    images = []
    for row in rows:
        firsts = np.cumsum([0, *row.lengths])
        pairs = zip(firsts, row.documents, strict=False)
        images.append(tuple(image.moved(first) for first, doc in pairs for image in doc.images))
    return [batch_header(info, [(row.lengths, i) for row, i in zip(rows, images, strict=True)], specs), *frames]


@dataclass(frozen=True)
class _Segment:
    """Some tokens of a document, or some padding."""

    document: Document | None
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def _parts(row: PackedRow, info: BatchInfo) -> Iterator[_Segment]:
    """What a piece of a row has."""
    start, end = cp_range(row.length, info.cp_rank, info.cp_world)
    first = 0
    for document, length in zip([*row.documents, None], [*map(len, row.documents), row.length], strict=True):
        a, b = max(start - first, 0), min(end - first, length)
        if a < b:
            yield _Segment(document, a, b)
        first += length


def _arrays(parts: Sequence[_Segment], common: Common) -> dict[str, NDArray[Any]]:
    """All arrays but routed experts."""

    def joined(of: Callable[[Document], NDArray[Any] | None], dtype: type[np.generic]) -> NDArray[Any]:
        found = [(part, of(part.document) if part.document is not None else None) for part in parts]
        return np.concatenate(
            [np.zeros(len(part), dtype) if all_ is None else all_[part.start : part.end] for part, all_ in found],
            dtype=dtype,
            casting="same_kind",
        )

    def repeated(of: Callable[[Document], Any], padding: Any, dtype: type[np.generic]) -> NDArray[Any]:
        values = [of(part.document) if part.document is not None else padding for part in parts]
        return np.repeat(np.array(values, dtype), [len(part) for part in parts])

    weights = joined(lambda doc: doc.cross_entropy, np.float32)
    usual = common.temperature
    sampled_at = repeated(lambda doc: usual if doc.temperature is None else doc.temperature, usual, np.float32)
    arrays = {
        "token_ids": joined(lambda doc: doc.token_ids, np.int32),
        "mask": joined(lambda doc: doc.mask, np.bool_),
        "logprobs": joined(lambda doc: doc.logprobs, np.float32),
        "advantages": joined(lambda doc: doc.advantages, np.float32),
        # cross-entropy is that of the policy itself, whatever it is sampled at
        "temperatures": np.where(weights > 0, np.float32(1), sampled_at),
        "on_policy": repeated(lambda doc: doc.on_policy, False, np.bool_),
    }
    if common.echoed:
        arrays["echo_weights"] = weights
    if common.referred:
        arrays["ref_logprobs"] = joined(lambda doc: doc.ref_logprobs, np.float32)
    return arrays


def _routed(part: _Segment, like: RoutedExperts | StoredArray) -> Iterator[FrameSource]:
    whole = None if part.document is None else part.document.routed_experts
    if whole is None:
        missing = len(part) * math.prod(like.shape[1:]) * like.dtype.itemsize
        for start in range(0, missing, len(UNKNOWN)):
            yield UNKNOWN[: min(len(UNKNOWN), missing - start)]
        return
    length = len(part.document or ())
    if whole.shape != (length, *like.shape[1:]) or whole.dtype != like.dtype:
        raise DamagedError(f"routed experts {whole.dtype}{whole.shape} where {length} like {like.shape[1:]} belong")
    if isinstance(whole, StoredArray):
        yield whole.rows(part.start, part.end).content
        return
    own: NDArray[Any] = np.ascontiguousarray(whole[part.start : part.end])
    yield own.reshape(-1).view(np.uint8).data
