"""The batches that the trainer may still ask for: formed once, then the same however often they are asked for.

The groups of a batch become the sequences that are trained as the run's algorithm says; packing makes
rows of exactly seq_len tokens of these, the same number of rows for every data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primeslurm.orchestrator.algorithms import Algorithm, Credit, Memory
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.losses import Average, CustomLoss
from primeslurm.wire import routed_experts
from primeslurm.wire.rollouts import Batch, BatchInfo, Bool, Float32, ImageSpan, Int32, Rollout, Row
from primeslurm.wire.routed_experts import RoutedExperts

KEPT_STEPS = 2
"""Packed batches kept: the step being trained and the one before."""


class Batches:
    """Rows of every rank by step. Packing is deterministic, so a restart packs the same rows from the same groups."""

    def __init__(self, recipe: Recipe, algorithm: Algorithm) -> None:
        self._recipe = recipe
        self._algorithm = algorithm
        self._temperatures = {each.label: recipe.sampling(each).temperature for each in recipe.environments}
        loss = recipe.trainer.loss
        self._average: Average = "tokens" if isinstance(loss, CustomLoss) else loss.average
        self._groups: dict[int, list[RolloutGroup]] = {}
        self._memory: dict[int, Memory] = {}
        self._packed: dict[tuple[int, int], list[Batch]] = {}

    def add(self, step: int, groups: Sequence[RolloutGroup], memory: Memory | None = None) -> None:
        """Keep the groups that `step` trains on, and forget those of steps that are not asked for any more.

        Args:
            step: that asks for them.
            groups: of its batch.
            memory: what the algorithm knew before it. None: nothing.
        """
        self._groups[step], self._memory[step] = list(groups), memory or {}
        for old in [s for s in self._groups if s <= step - KEPT_STEPS]:
            del self._groups[old], self._memory[old]
        self._packed = {key: value for key, value in self._packed.items() if key[0] in self._groups}

    def groups(self, step: int) -> list[RolloutGroup] | None:
        """Return the groups of a step, or None if they are not kept any more."""
        return self._groups.get(step)

    def get(self, step: int, rank: int, ranks: int) -> Batch | None:
        """Return the rows of one of `ranks` ranks, or None if there is no such batch (any more)."""
        if step not in self._groups:
            return None
        if (step, ranks) not in self._packed:
            self._packed[step, ranks] = self._pack(step, ranks)
        return self._packed[step, ranks][rank]

    def _pack(self, step: int, ranks: int) -> list[Batch]:
        seq_len, max_steps = self._recipe.seq_len, self._recipe.max_steps
        algorithm = self._algorithm.recalling(self._memory[step])
        groups = self._groups[step]
        if self._recipe.orchestrator.staleness.counts_tokens:
            oldest = step - 1 - self._recipe.orchestrator.max_off_policy_steps
            groups = [group.without_older(oldest) for group in groups]
        docs = documents(groups, seq_len, step - 1, algorithm, self._temperatures, self._average)
        total = loss_tokens(docs)
        rows = pack(docs, seq_len, ranks, self._recipe.orchestrator.sampling.temperature)
        has_images = any(doc.images for doc in docs)
        return [Batch(BatchInfo(step, rank, ranks, total, max_steps, has_images), r) for rank, r in enumerate(rows)]


def documents(
    groups: Sequence[RolloutGroup],
    seq_len: int,
    version: int,
    algorithm: Algorithm,
    temperatures: Mapping[str, float] = MappingProxyType({}),
    average: Average = "tokens",
) -> list[Document]:
    """Make documents of all sequences of the groups.

    Args:
        groups: of one batch.
        seq_len: longest document [tokens]; sequences are cut to it.
        version: of the policy that is trained: what it sampled all of is on-policy.
        algorithm: assigns credit to the tokens.
        temperatures: at which environments sample, by label; of those that are not there, that of the batch.
        average: what advantages are averaged over.

    Raises:
        UsageError: an algorithm of the user's own made an error.
    """
    cut = [group.cut(seq_len) for group in groups]
    found = averaged(cut, algorithm.assign(cut), average, seq_len)
    return [
        _document(sequence, credit, _is_on_policy(original, version), temperatures.get(group.environment))
        for before, group, credits in zip(groups, cut, found, strict=True)
        for original, sequence, credit in zip(before.sequences, group.sequences, credits, strict=True)
    ]


def _is_on_policy(rollout: Rollout, version: int) -> bool:
    """A rollout that was in flight over an update has KV of the older policy even under its newer tokens."""
    return rollout.info.opened_version == version and not rollout.is_mixed


def _document(sequence: Rollout, credit: Credit, on_policy: bool, temperature: float | None) -> Document:
    return Document(
        sequence.token_ids,
        credit.mask,
        sequence.logprobs,
        credit.advantages,
        on_policy,
        cross_entropy=credit.cross_entropy,
        routed_experts=sequence.routed_experts,
        ref_logprobs=sequence.ref_logprobs,
        images=sequence.info.images,
        temperature=temperature,
    )


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


def averaged(
    groups: Sequence[RolloutGroup], credits: Sequence[Sequence[Credit]], average: Average, seq_len: int
) -> Sequence[Sequence[Credit]]:
    """Scale advantages so that their sum over N is the average that is asked for.

    The trainer divides a batch's losses by its number of trained tokens N. Every policy gradient is proportional to the
    advantage, so another average is another factor of the advantages: no rank has to know more than it trains.

    With N trained tokens of n rollouts in the batch, and m of them of the rollout (of several agents, of the trace): by
    N / (n * m) for `rollouts`, by N / (n * seq_len) for `seq_len`.

    Args:
        groups: of the batch.
        credits: for each group, one for each of its sequences.
        average: over what.
        seq_len: longest sequence [tokens].

    Returns:
        Credits in the same order.
    """
    if average == "tokens":
        return credits
    lengths = [_lengths(group, mine) for group, mine in zip(groups, credits, strict=True)]
    rollouts = sum(length > 0 for mine in lengths for length in mine)
    tokens = sum(length for mine in lengths for length in mine)
    scaled = []
    for group, mine, of_traces in zip(groups, credits, lengths, strict=True):
        spread = [n for trace, n in zip(group.traces, of_traces, strict=True) for _ in trace]
        factors = [tokens / max(1, rollouts * (n if average == "rollouts" else seq_len)) for n in spread]
        scaled.append(
            [
                replace(credit, advantages=(credit.advantages * factor).astype(np.float32))
                for credit, factor in zip(mine, factors, strict=True)
            ]
        )
    return scaled


def _lengths(group: RolloutGroup, credits: Sequence[Credit]) -> list[int]:
    """Trained tokens of each trace."""
    trained = iter([int(credit.mask.sum()) for credit in credits])
    return [sum(next(trained) for _ in trace) for trace in group.traces]
