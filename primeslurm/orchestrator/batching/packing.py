"""Token sequences into rows of exactly seq_len tokens, the same number of rows for every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primeslurm.wire import routed_experts
from primeslurm.wire.rollouts import Bool, Float32, ImageSpan, Int32, Row
from primeslurm.wire.routed_experts import RoutedExperts


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
    routed_experts: RoutedExperts | None = field(default=None, kw_only=True)
    ref_logprobs: Float32 | None = field(default=None, kw_only=True)
    images: tuple[ImageSpan, ...] = field(default=(), kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)
    """Its tokens were sampled at. None: that of the batch."""

    def __len__(self) -> int:
        return len(self.token_ids)


class _Common(NamedTuple):
    """What holds for all rows of a batch."""

    seq_len: int
    temperature: float
    echoed: bool
    routed: RoutedExperts | None
    referred: bool


def pack(docs: Sequence[Document], seq_len: int, ranks: int, temperature: float) -> list[list[Row]]:
    """Pack documents into the rows of each rank: first fit decreasing, dealt so that ranks' token counts are close.

    Args:
        docs: none longer than seq_len.
        seq_len: tokens of a row, padding included.
        ranks: how many data-parallel ranks there are.
        temperature: sampling temperature of the documents that name none.

    Returns:
        For each rank its rows, as many as every other has; where documents do not suffice, empty ones.
    """
    bins = _fit([len(doc) for doc in docs], seq_len)
    per_rank = max(1, -(-len(bins) // ranks))
    routed = next((doc.routed_experts for doc in docs if doc.routed_experts is not None), None)
    echoed = any(doc.cross_entropy is not None for doc in docs)
    referred = any(doc.ref_logprobs is not None for doc in docs)
    common = _Common(seq_len, temperature, echoed, routed, referred)
    dealt = _deal([sum(len(docs[i]) for i in members) for members in bins], ranks, per_rank)
    return [
        [_row([docs[i] for i in bins[b]], common) for b in mine] + [_row([], common)] * (per_rank - len(mine))
        for mine in dealt
    ]


def loss_tokens(docs: Sequence[Document]) -> int:
    """Count the sampled tokens that are trained, in the whole batch."""
    return sum(int(doc.mask.sum()) for doc in docs)


def _fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        target = next((b for b, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([])
            room.append(capacity)
            target = len(bins) - 1
        bins[target].append(index)
        room[target] -= length
    return bins


def _deal(weights: Sequence[int], ranks: int, per_rank: int) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < per_rank), key=lambda r: totals[r])
        dealt[rank].append(index)
        totals[rank] += weights[index]
    return dealt


def _row(docs: Sequence[Document], common: _Common) -> Row:
    padding = common.seq_len - sum(len(doc) for doc in docs)
    lengths = [*(len(doc) for doc in docs), padding]
    firsts = np.cumsum([0, *lengths])

    def joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        whole: NDArray[Any] = np.concatenate([*parts, np.zeros(padding, dtype)])
        return whole.astype(dtype, copy=False)

    weights, routed = joined([_or_zeros(doc, doc.cross_entropy) for doc in docs], np.float32), common.routed
    own = [common.temperature if doc.temperature is None else doc.temperature for doc in docs]
    sampled_at = np.repeat(np.array([*own, common.temperature], np.float32), lengths)
    return Row(
        token_ids=joined([doc.token_ids for doc in docs], np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        mask=joined([doc.mask for doc in docs], np.bool_),
        logprobs=joined([doc.logprobs for doc in docs], np.float32),
        advantages=joined([doc.advantages for doc in docs], np.float32),
        # cross-entropy is that of the policy itself, whatever it is sampled at
        temperatures=np.where(weights > 0, np.float32(1), sampled_at),
        on_policy=joined([np.full(len(doc), doc.on_policy, np.bool_) for doc in docs], np.bool_),
        echo_weights=weights if common.echoed else None,
        routed_experts=None
        if routed is None
        else routed_experts.join([*(doc.routed_experts for doc in docs), None], lengths, routed),
        ref_logprobs=joined([_or_zeros(doc, doc.ref_logprobs) for doc in docs], np.float32)
        if common.referred
        else None,
        images=tuple(image.moved(first) for first, doc in zip(firsts, docs, strict=False) for image in doc.images),
    )


def _or_zeros(doc: Document, array: Float32 | None) -> Float32:
    return np.zeros(len(doc), np.float32) if array is None else array
