"""Batches as trainer ranks receive them."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.orchestrator.batching import packing
from primeslurm.orchestrator.batching.batches import Batches, StepShard
from primeslurm.orchestrator.batching.packing import Common, Document, RowLengths, encode
from primeslurm.wire.batches.batch import Batch, BatchInfo, RankShard, Row
from primeslurm.wire.batches.frames import Frame, assembled


def received(frames: Sequence[Frame]) -> Batch:
    """Return a batch that was sent, however its bytes were split into frames."""
    return Batch.decode(assembled(frames))


def batch_of(batches: Batches, step: int) -> Batch | None:
    """Return the batch of a step for a single rank; None if there is none."""
    frames = batches.get(StepShard(step, RankShard(0, 1)))
    return None if frames is None else received(frames)


def pack(
    docs: Sequence[Document],
    seq_len: int,
    ranks: int,
    temperature: float,
    quantum: int | None = None,
    cp_rank: int = 0,
    cp_world: int = 1,
) -> list[list[Row]]:
    """Return the rows of each rank (with context parallelism its slices of them), as the wire delivers them."""
    common = Common.of(docs, temperature)
    return [
        received(encode(rows, BatchInfo(1, rank, ranks, 0, cp_rank=cp_rank, cp_world=cp_world), common)).rows
        for rank, rows in enumerate(packing.pack(docs, RowLengths(seq_len, quantum), ranks))
    ]
