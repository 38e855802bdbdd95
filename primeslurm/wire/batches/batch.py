"""Batches: packed rows of documents that one trainer rank trains in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from primeslurm.wire.batches.frames import (
    MAX_AXIS,
    Arrays,
    ArraySpec,
    Bool,
    Float32,
    Frame,
    Int32,
    encode_header,
    from_frames,
    mismatch,
    to_frames,
)
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.decoding import Count, DamagedError


@dataclass(frozen=True)
class Row:
    """One packed row, or the shard of it that one context-parallel rank trains.

    `positions` are always those of the whole row: they restart at 0 where a document starts, and padding is a document
    of its own. Each branch of a document continues the positions of its prefix. Other arrays cover the shard and the
    token after it, which the shard's last token predicts.
    """

    token_ids: Int32
    positions: Int32
    mask: Bool
    logprobs: Float32
    advantages: Float32
    temperatures: Float32
    # Tokens of rollouts that the trained policy sampled completely: trainer and engine logprobs must agree there.
    on_policy: Bool
    # Factor of the cross-entropy of echoed tokens, 0 elsewhere, scaled for a division of the loss by `loss_tokens`.
    # None unless the batch has such tokens.
    echo_weights: Float32 | None = None
    # [tokens, layers, top_k]; None unless the trainer replays them. All rows of a batch have them, or none.
    routed_experts: RoutedExperts | None = None
    # The teacher's log-probabilities of the trained tokens. None without a teacher.
    ref_logprobs: Float32 | None = None
    # Branch of each token in a document whose sequences share a prefix, from 1; 0 for prefixes and other documents. All
    # rows of a batch have it, or none.
    branches: Int32 | None = None
    images: tuple[ImageSpan, ...] = ()  # images of the whole row, in order

    def arrays(self) -> dict[str, NDArray[Any]]:
        named = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "images"}
        return {name: array for name, array in named.items() if array is not None}

    def cp_shard(self, rank: int, ranks: int) -> Row:
        """Return the shard of a whole row for one of `ranks` context-parallel ranks. Arrays are views."""
        start, end = cp_range(len(self.positions), rank, ranks)
        shard: Any = {name: array[start:end] for name, array in self.arrays().items() if name != "positions"}
        return replace(self, **shard)


def cp_range(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return start and end of the shard of a rank, with the token after it if any. `ranks` divides `length`."""
    size = length // ranks
    return rank * size, min((rank + 1) * size + 1, length)


def stack(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """Stack each array of some rows to [rows, tokens, ...], by name. A single row is not copied."""
    if len(rows) == 1:
        return {name: array[None] for name, array in rows[0].arrays().items()}
    return {name: np.stack([getattr(row, name) for row in rows]) for name in rows[0].arrays()}


class RankShard(msgspec.Struct, frozen=True):
    """The part of a batch that a rank trains: rows by data-parallel rank, tokens of each by context-parallel rank."""

    dp_rank: int
    dp_world: int
    cp_rank: int = 0
    cp_world: int = 1


class KeptDocument(msgspec.Struct, frozen=True):
    """A document whose trainer log-probabilities are written down, because its rollout is in the archive."""

    number: Count  # number of the document in the whole batch
    row: Count  # index of the row among the rank's rows
    start: Count  # position of its first token in the whole row, after a shared prefix
    length: Count
    prefix: Count = 0  # number of its tokens in a shared prefix, which is not at `start`


class BatchInfo(msgspec.Struct, frozen=True):
    """Step, sizes and settings of one rank's batch: all data except its rows."""

    step: int
    dp_rank: int
    dp_world: int
    loss_tokens: int  # Sampled tokens that are trained, over all ranks. The loss is divided by it.
    max_steps: int = 0
    has_images: bool = False  # whether any row of any rank has images
    cp_rank: int = 0  # index of these shards of the rows, of `cp_world`
    cp_world: int = 1
    rows_at_once: int = 0  # Rows of a micro batch. 0: as many as fit, and all rows have the same length.
    kept: tuple[KeptDocument, ...] = ()  # documents in these rows whose trainer log-probabilities are archived

    @property
    def shard(self) -> RankShard:
        return RankShard(self.dp_rank, self.dp_world, self.cp_rank, self.cp_world)


class _RowHeader(msgspec.Struct, frozen=True):
    """Metadata of a row on the wire. Its arrays follow as buffers."""

    documents: list[Count]  # lengths of the documents, from which positions are computed
    images: tuple[ImageSpan, ...] = ()


class _Header(msgspec.Struct, frozen=True):
    """Metadata of a batch on the wire. Its arrays follow as buffers."""

    info: BatchInfo
    rows: list[_RowHeader]


@dataclass(frozen=True)
class Batch:
    """One rank's rows, or shards of rows, for one step.

    Every rank has the same number of rows. Rows of different data-parallel ranks may differ in length.
    """

    info: BatchInfo
    rows: list[Row] = field(default_factory=list)

    def encode(self) -> list[Frame]:
        names = [name for name in self.rows[0].arrays() if name != "positions"]
        arrays = {name: np.concatenate([getattr(row, name) for row in self.rows]) for name in names}
        rows = [_RowHeader(lengths_of(row.positions), row.images) for row in self.rows]
        return to_frames(_Header(self.info, rows), arrays)

    @classmethod
    def decode(cls, message: Sequence[Any]) -> Batch:
        """Decode a batch from wire frames. Arrays but positions are views of them. Raise DamagedError."""
        header, arrays = from_frames(message, _Header)
        if problem := _problem(header, arrays):
            raise DamagedError(problem)
        info, start, rows = header.info, 0, []
        for row in header.rows:
            first, last = cp_range(sum(row.documents), info.cp_rank, info.cp_world)
            end = start + last - first
            shard = {name: array[start:end] for name, array in arrays.items()}
            positions = positions_of(row.documents, shard.get("branches"))
            rows.append(Row(positions=positions, images=row.images, **shard))
            start = end
        return cls(info, rows)

    def cp_shard(self, rank: int, ranks: int) -> Batch:
        """Return the shards of the rows for a context-parallel rank. Raises ValueError if it has those of another."""
        if (self.info.cp_rank, self.info.cp_world) == (rank, ranks):
            return self
        if self.info.cp_world > 1:
            raise ValueError(
                f"the batch has shards for rank {self.info.cp_rank} of {self.info.cp_world}, not {rank} of {ranks}"
            )
        info = msgspec.structs.replace(self.info, cp_rank=rank, cp_world=ranks)
        return Batch(info, [row.cp_shard(rank, ranks) for row in self.rows])


def batch_header(
    info: BatchInfo, rows: Sequence[tuple[Sequence[int], tuple[ImageSpan, ...]]], specs: Sequence[ArraySpec]
) -> bytes:
    return encode_header(_Header(info, [_RowHeader(list(documents), images) for documents, images in rows]), specs)


def lengths_of(positions: Int32) -> list[int]:
    starts = np.flatnonzero(positions == 0)
    return [int(length) for length in np.diff(starts, append=len(positions))]


def positions_of(documents: Sequence[int], branches: Int32 | None = None) -> Int32:
    """Return the positions of a row. `branches` are those of the whole row, as in `Row`."""
    positions, start = np.empty(sum(documents), np.int32), 0
    for length in documents:
        positions[start : start + length] = np.arange(length, dtype=np.int32)
        start += length
    if branches is None:
        return positions
    prefix, changes = 0, np.flatnonzero(np.diff(branches, prepend=0))
    for start, end in pairwise([*changes, len(branches)]):
        if branches[start] == 1:
            prefix = positions[start]
        if branches[start]:
            positions[start:end] -= positions[start] - prefix
    return positions


def _problem(header: _Header, arrays: Arrays) -> str:
    info, tokens = header.info, arrays.get("token_ids")
    if not 0 <= info.dp_rank < info.dp_world:
        return f"data-parallel rank {info.dp_rank} of {info.dp_world}"
    if not 0 <= info.cp_rank < info.cp_world <= MAX_AXIS:
        return f"context-parallel rank {info.cp_rank} of {info.cp_world}"
    lengths = [sum(row.documents) for row in header.rows]
    if not lengths or min(lengths) <= 0 or any(length % info.cp_world for length in lengths):
        return f"rows without tokens, or not divisible by {info.cp_world}"
    ranges = [cp_range(length, info.cp_rank, info.cp_world) for length in lengths]
    if tokens is None or tokens.shape != (sum(end - start for start, end in ranges),):
        return "another number of tokens than the header says"
    return mismatch(Row, arrays, tokens.shape, without="positions")
