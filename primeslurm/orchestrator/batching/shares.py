"""What one rank gets of a packed batch, as frames: its rows, or its piece of each.

Routed experts are nearly all of a large batch, and are not copied: their frames are views of the rollouts' own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primeslurm.orchestrator.batching.packing import Document, PackedRow
from primeslurm.wire.received import ArraySpec, DamagedError
from primeslurm.wire.rollouts import BatchInfo, Frame, batch_header, piece
from primeslurm.wire.routed_experts import RoutedExperts

UNKNOWN = memoryview(b"\xff" * (1 << 20))
"""Routed experts of tokens that the engines said nothing of, as bytes."""


@dataclass(frozen=True)
class Common:
    """What holds for all rows of a batch."""

    temperature: float
    """At which documents were sampled that name none."""
    echoed: bool
    referred: bool
    routed: RoutedExperts | None
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


def encode(rows: Sequence[PackedRow], info: BatchInfo, common: Common) -> list[Frame]:
    """Encode what one rank gets.

    Args:
        rows: of its data-parallel share.
        info: says which piece of each is its own.
        common: to all rows of the batch.

    Returns:
        The header, and the bytes of the arrays, cut into frames as it suits.

    Raises:
        DamagedError: routed experts are of another length or of another model than others.
        ValueError: rows cannot be cut into so many equal pieces.
    """
    if odd := [row.length for row in rows if row.length % info.cp_world]:
        raise ValueError(f"{info.cp_world} ranks cannot share rows of {odd[0]} tokens")
    parts = [part for row in rows for part in _parts(row, info)]
    arrays = _arrays(parts, common)
    specs = [ArraySpec(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    frames: list[Frame] = [array.view(np.uint8).data for array in arrays.values()]
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
class _Part:
    """Some tokens of a document, or some padding."""

    document: Document | None
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def _parts(row: PackedRow, info: BatchInfo) -> Iterator[_Part]:
    """What a piece of a row has."""
    start, end = piece(row.length, info.cp_rank, info.cp_world)
    first = 0
    for document, length in zip([*row.documents, None], [*map(len, row.documents), row.length], strict=True):
        a, b = max(start - first, 0), min(end - first, length)
        if a < b:
            yield _Part(document, a, b)
        first += length


def _arrays(parts: Sequence[_Part], common: Common) -> dict[str, NDArray[Any]]:
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


def _routed(part: _Part, like: RoutedExperts) -> Iterator[Frame]:
    whole = None if part.document is None else part.document.routed_experts
    if whole is None:
        missing = len(part) * like[0].nbytes
        for start in range(0, missing, len(UNKNOWN)):
            yield UNKNOWN[: min(len(UNKNOWN), missing - start)]
        return
    length = len(part.document or ())
    if whole.shape != (length, *like.shape[1:]) or whole.dtype != like.dtype:
        raise DamagedError(f"routed experts {whole.dtype}{whole.shape} where {length} like {like.shape[1:]} belong")
    own: NDArray[Any] = np.ascontiguousarray(whole[part.start : part.end])
    yield own.reshape(-1).view(np.uint8).data
