"""Token sequences into rows of exactly seq_len tokens, the same number of rows for every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primeslurm.orchestrator.groups import Group
from primeslurm.recipe.rollouts import AdvantageRule
from primeslurm.wire import routed_experts
from primeslurm.wire.rollouts import Bool, Float32, Int32, Picture, Rollout, Row, whole
from primeslurm.wire.routed_experts import RoutedExperts


@dataclass(frozen=True)
class Document:
    """One sequence to train on. All arrays have shape [n_tokens], routed experts [n_tokens, layers, top_k]."""

    token_ids: Int32
    mask: Bool
    logprobs: Float32
    advantages: Float32
    on_policy: bool
    observed: Bool | None = field(default=None, kw_only=True)
    routed_experts: RoutedExperts | None = field(default=None, kw_only=True)
    ref_logprobs: Float32 | None = field(default=None, kw_only=True)
    pictures: tuple[Picture, ...] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.token_ids)


def documents(
    groups: Sequence[Group], seq_len: int, version: int, rule: AdvantageRule, opd_reward: float = 0.0
) -> list[Document]:
    """All sequences of the groups, cut to seq_len, to be trained on policy `version`.

    A first token has no predecessor, so it is never trained.

    Every token has its rollout's advantage, but for opd (on-policy distillation: MiniLLM, arXiv 2306.08543, and GKD,
    arXiv 2306.13649, in the form of Thinking Machines Lab, On-Policy Distillation, 2025: no return over later tokens).
    There it has the teacher's log-probability minus the engine's, whose mean over sampled tokens estimates
    -KL(policy || teacher), plus `opd_reward` times its rollout's.

    Raises:
        ValueError: opd, and a group that no teacher was asked about.
    """
    distilled = rule == "opd"
    share = opd_reward if distilled else 1.0
    return [
        _document(branch, share * advantage, seq_len, version, distilled)
        for group in groups
        for branches, advantage in zip(group.rollouts, group.advantages(rule), strict=True)
        for branch in branches
    ]


class _Common(NamedTuple):
    """What holds for all rows of a batch."""

    seq_len: int
    temperature: float
    echo_weight: float | None
    routed: RoutedExperts | None
    referred: bool


def pack(
    docs: Sequence[Document], seq_len: int, ranks: int, temperature: float, echo: float | None = None
) -> list[list[Row]]:
    """Rows of each rank. First fit decreasing; rows are dealt so that the ranks' token counts are close.

    Args:
        docs: none longer than seq_len.
        temperature: sampling temperature of every sampled token.
        echo: factor of the mean cross-entropy on observed tokens. None: they are not trained.
    """
    bins = _fit([len(doc) for doc in docs], seq_len)
    per_rank = max(1, -(-len(bins) // ranks))
    routed = next((doc.routed_experts for doc in docs if doc.routed_experts is not None), None)
    weight = None if echo is None else echo * max(1, loss_tokens(docs)) / max(1, _observed_tokens(docs))
    referred = any(doc.ref_logprobs is not None for doc in docs)
    common = _Common(seq_len, temperature, weight, routed, referred)
    dealt = _deal([sum(len(docs[i]) for i in members) for members in bins], ranks, per_rank)
    return [
        [_row([docs[i] for i in bins[b]], common) for b in mine] + [_row([], common)] * (per_rank - len(mine))
        for mine in dealt
    ]


def loss_tokens(docs: Sequence[Document]) -> int:
    """Sampled tokens that are trained, in the whole batch."""
    return sum(int(doc.mask.sum()) for doc in docs)


def _observed_tokens(docs: Sequence[Document]) -> int:
    return sum(int(doc.observed.sum()) for doc in docs if doc.observed is not None)


def _document(rollout: Rollout, advantage: float, seq_len: int, version: int, distilled: bool) -> Document:
    length, pictures = whole(rollout.info.pictures, seq_len)
    mask = rollout.mask[:length].copy()
    mask[:1] = False
    advantages = np.full(len(mask), advantage, np.float32)
    if distilled:
        if rollout.ref_logprobs is None:
            raise ValueError(f"rollout {rollout.info.id}: no teacher was asked about it")
        advantages += np.where(mask, rollout.ref_logprobs[:length] - rollout.logprobs[:length], 0)
    # A rollout that was in flight over an update has KV of the older policy even under its newer tokens.
    on_policy = rollout.info.opened_version == version and not rollout.is_mixed
    return Document(
        rollout.token_ids[:length],
        mask,
        rollout.logprobs[:length],
        advantages,
        on_policy,
        observed=None if rollout.observed is None else rollout.observed[:length],
        routed_experts=None if rollout.routed_experts is None else rollout.routed_experts[:length],
        ref_logprobs=None if rollout.ref_logprobs is None else rollout.ref_logprobs[:length],
        pictures=pictures,
    )


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

    observed = joined([np.zeros(len(doc)) if doc.observed is None else doc.observed for doc in docs], np.bool_)
    weight, routed = common.echo_weight, common.routed
    return Row(
        token_ids=joined([doc.token_ids for doc in docs], np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        mask=joined([doc.mask for doc in docs], np.bool_),
        logprobs=joined([doc.logprobs for doc in docs], np.float32),
        advantages=joined([doc.advantages for doc in docs], np.float32),
        # cross-entropy is that of the policy itself, whatever it is sampled at
        temperatures=np.where(observed, 1.0, common.temperature).astype(np.float32),
        on_policy=joined([np.full(len(doc), doc.on_policy, np.bool_) for doc in docs], np.bool_),
        echo_weights=None if weight is None else np.where(observed, weight, 0.0).astype(np.float32),
        routed_experts=None
        if routed is None
        else routed_experts.join([*(doc.routed_experts for doc in docs), None], lengths, routed),
        ref_logprobs=joined([_referred(doc) for doc in docs], np.float32) if common.referred else None,
        pictures=tuple(p.moved(first) for first, doc in zip(firsts, docs, strict=False) for p in doc.pictures),
    )


def _referred(doc: Document) -> Float32:
    return np.zeros(len(doc), np.float32) if doc.ref_logprobs is None else doc.ref_logprobs
