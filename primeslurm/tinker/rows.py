"""How sequences are packed into rows, and which rows, and which part of each, a rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primeslurm.nn import compat
from primeslurm.recipe.sections.tenant_deployment import BATCH_TOKENS
from primeslurm.tinker.requests import Datum

# Adapters of a shared pass times their largest padded rank. This bounds the memory of the stacks, which are float32.
STACKED_RANKS = 512
# The rank of stacks is a multiple of this: grouped products on GPUs need it, and so do recipes.
RANK_STEP = 8

Row = tuple[int, Sequence[Datum]]
"""Index of a pass, and sequences of it."""


def fit(lengths: Sequence[Sequence[int]], ranks: Sequence[int], dp: int = 1, cp: int = 1) -> bool:
    """Return whether passes become one batch, as `batches` divides them.

    `lengths` are those of each pass's sequences, and `ranks` are the LoRA ranks of their adapters.
    """
    if len(ranks) * padded_rank(ranks) > STACKED_RANKS:
        return False
    longest = max((length for each in lengths for length in each), default=0)
    return sum(len(_pack(each, longest)) for each in lengths) <= _most_rows(longest, dp, cp)


def padded_rank(ranks: Iterable[int]) -> int:
    """Return the LoRA rank of a stack of adapters."""
    return -(-max(ranks) // RANK_STEP) * RANK_STEP


def batches(passes: Sequence[Sequence[Datum]], dp: int = 1, cp: int = 1) -> list[list[list[Row]]]:
    """Return batches as the rows of each of `dp` data-parallel ranks. The rows of a pass follow each other.

    A rank gets about BATCH_TOKENS of a batch, or one longer sequence. `cp` context-parallel ranks share each row.
    """
    lengths = [[len(datum.tokens) for datum in data] for data in passes]
    room = max(length for each in lengths for length in each)
    if len(passes) == 1 and not compat.ON_CPU:
        # One long row needs no padding. But on CPUs, the cost of attention is quadratic in the length of a row.
        room = max(room, min(BATCH_TOKENS * cp, -(-sum(lengths[0]) // dp)))
    rows = [(index, data[part]) for index, data in enumerate(passes) for part in _pack(lengths[index], room)]
    count = _most_rows(room, dp, cp)
    return [_split(rows[start : start + count], dp) for start in range(0, len(rows), count)]


def _most_rows(room: int, dp: int, cp: int) -> int:
    return max(1, BATCH_TOKENS * cp // max(1, room)) * dp


def _pack(lengths: Sequence[int], room: int) -> list[slice]:
    """Split consecutive sequences into rows of at most `room` tokens, or of one longer sequence."""
    starts, used = [0], 0
    for index, length in enumerate(lengths):
        if used and used + length > room:
            starts.append(index)
            used = 0
        used += length
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def _split(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Divide rows among ranks. A rank without any gets a row without targets, because collectives need all ranks."""
    ends = [len(rows) * rank // ranks for rank in range(ranks + 1)]
    return [[*rows[begin:end]] or [_without_targets(rows[0])] for begin, end in pairwise(ends)]


def _without_targets(row: Row) -> Row:
    owner, (datum, *_) = row
    inputs = {name: array[:1].reshape(1, -1)[:, :0] for name, array in datum.inputs.items()}
    return owner, [Datum(datum.tokens[:1], inputs)]


def targets(datum: Datum) -> NDArray[Any]:
    return datum.inputs["target_tokens"]


def width(rows: Sequence[Sequence[Datum]], cp: int) -> int:
    """Return the length of rows with padding [tokens]."""
    longest = max(sum(len(datum.tokens) for datum in row) for row in rows)
    return -(-longest // cp) * cp


def joined(row: Sequence[Datum], name: str) -> NDArray[Any]:
    """Return an input of a row's sequences, for each target of the row."""
    return np.concatenate([datum.inputs[name].ravel() for datum in row])


def shard(row: Sequence[Datum], begin: int, size: int) -> tuple[NDArray[np.int64], slice]:
    """Return where a row has targets after position `begin` and within `size` tokens, and which of its targets."""
    starts = np.cumsum([0, *(len(datum.tokens) for datum in row)])
    places = np.concatenate(
        [
            np.repeat(np.arange(start, start + len(datum.tokens)), targets(datum)[:1].size)
            for start, datum in zip(starts[:-1], row, strict=True)
        ]
    )
    part = slice(*np.searchsorted(places, [begin, begin + size]).tolist())
    return places[part] - begin, part


def by_datum(values: NDArray[np.float32], data: Sequence[Datum]) -> list[NDArray[np.float32]]:
    """Split values of targets by datum, in the shapes of the targets."""
    parts = np.split(values, np.cumsum([targets(datum).size for datum in data])[:-1])
    return [part.reshape(targets(datum).shape) for part, datum in zip(parts, data, strict=True)]
