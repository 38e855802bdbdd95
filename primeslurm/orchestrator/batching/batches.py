"""The batches that the trainer may still request.

The groups of a batch are chosen once. Only the last two packed batches stay in memory. An older one is packed again
from its groups, which gives the same bytes.

The run's algorithm assigns credit to the sequences of a batch, and packing makes rows of them, equally many for every
data-parallel rank.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from primeslurm.orchestrator.algorithms import Algorithm, Credit, Memory
from primeslurm.orchestrator.batching.packing import Common, Document, PackedRow, PrefixTree, RowLengths, encode, pack
from primeslurm.orchestrator.batching.prefix_trees import pack_trees
from primeslurm.orchestrator.dispatch.staleness import AgeLimit
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import SpooledGroup
from primeslurm.orchestrator.rollouts.transcripts import Credited
from primeslurm.orchestrator.telemetry.rollout_recorder import RolloutRecorder
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.losses import Average, CustomLoss
from primeslurm.wire.batches.batch import BatchInfo, KeptDocument, RankShard
from primeslurm.wire.batches.file_ranges import FrameSource, StoredArray
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link.messages import Answer

log = logging.getLogger(__name__)
# Number of batches in memory: usually the step being trained, and the one before or after it
KEPT_STEPS = 2


class StepShard(NamedTuple):
    """The part of a step's batch that one rank gets."""

    step: int
    shard: RankShard


@dataclass(frozen=True)
class _Packed:
    info: BatchInfo
    rows: list[list[PackedRow]]  # Rows of each data-parallel rank
    common: Common
    kept: list[tuple[KeptDocument, ...]]  # Documents of each data-parallel rank that are in the archive


class Batches:
    """The batches by step. Packing is deterministic, so a restart packs the same rows from the same groups.

    Args:
        on_disk: Returns a group whose arrays are on disk only. None: the group is not on disk.
        committed: The last committed step. Its batch and earlier ones are not requested again.
        recorder: Keeps some rollouts of each batch. None: none are kept.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        on_disk: Callable[[RolloutGroup], RolloutGroup | None] = lambda group: None,
        committed: int = 0,
        recorder: RolloutRecorder | None = None,
    ) -> None:
        self._recipe = recipe
        self._recorder = recorder
        self._on_disk = on_disk
        self._committed = committed
        # The event loop takes this lock, too, so it is held only for moments.
        self._using = threading.Lock()
        # Steps whose batches may be in memory, the latest last
        self._recent: list[int] = []
        self._algorithm = algorithm
        self._temperatures = {each.label: recipe.sampling(each).temperature for each in recipe.environments}
        loss = recipe.trainer.loss
        self._average: Average = "tokens" if isinstance(loss, CustomLoss) else loss.average
        self._groups: dict[int, list[RolloutGroup]] = {}
        self._memory: dict[int, Memory] = {}
        self._packed: dict[tuple[int, int], _Packed] = {}
        self._encoded: dict[StepShard, list[FrameSource]] = {}
        self._encoding: dict[StepShard, asyncio.Task[list[FrameSource] | None]] = {}
        # One thread: the other ranks' requests wait for the packing of their batch, and nothing else does.
        self._thread = ThreadPoolExecutor(1, "packing")

    def add(self, step: int, groups: Sequence[RolloutGroup], memory: Memory | None = None) -> None:
        """Add the batch of `step`. `memory`: state of the algorithm before it."""
        self._use(step)  # first, or a thread that evicts would take it for an old one
        self._groups[step], self._memory[step] = list(groups), memory or {}

    def committed(self, step: int) -> None:
        """Forget the batches of all steps up to this one."""
        self._committed = max(step, self._committed)

    def handed_over(self, shard: StepShard) -> None:
        """Drop an encoded shard that was written to a file."""
        self._encoded.pop(shard, None)

    async def answer(self, shard: StepShard, within_s: float) -> list[FrameSource] | Answer | None:
        """Return an encoded shard, "wait" after `within_s` (a batch on disk may take minutes), or None as in `get`."""
        if (encoded := self.encoded(shard)) is not None:  # a repeat, or the next chunk
            return encoded
        encoding = self._encoding.get(shard)
        if encoding is None:
            encoding = self._encoding[shard] = asyncio.create_task(self.serve(shard))
            encoding.add_done_callback(lambda _: self._encoding.pop(shard))
        done, _ = await asyncio.wait([encoding], timeout=within_s)
        return encoding.result() if done else Answer("wait")

    async def serve(self, shard: StepShard) -> list[FrameSource] | None:
        """Call `get` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.get, shard)

    async def read(self, step: int) -> list[RolloutGroup]:
        """Return the groups of a step for its metrics, without routed experts. Empty if they were evicted."""
        groups = self._groups.get(step, [])
        try:
            return [await asyncio.to_thread(_slim, one) if isinstance(one, SpooledGroup) else one for one in groups]
        except DamagedError as error:
            log.error("step %d has no batch metrics, because a group on disk is damaged: %s", step, error)
            return []

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def encoded(self, shard: StepShard) -> list[FrameSource] | None:
        return self._encoded.get(shard)

    def get(self, shard: StepShard) -> list[FrameSource] | None:
        """Pack and encode a shard, or return None if there is no such batch. Takes seconds; runs in one thread."""
        if (encoded := self._encoded.get(shard)) is not None:
            return encoded
        step, rank = shard
        if step in self._groups and step > self._committed and step not in self._recent:
            self._use(step)
        self._evict()  # before this batch is read, to make room for it
        packed = self._packed.get((step, rank.dp_world)) or self._pack(step, rank.dp_world)
        if packed is None:
            return None
        info = msgspec.structs.replace(packed.info, kept=packed.kept[rank.dp_rank], **msgspec.structs.asdict(rank))
        frames = self._encoded[shard] = encode(packed.rows[rank.dp_rank], info, packed.common)
        return frames

    def _use(self, step: int) -> None:
        with self._using:
            self._recent = [*(other for other in self._recent if other != step), step][-KEPT_STEPS:]

    def _evict(self) -> None:
        """Evict all batches but the recent ones. It opens files and frees tens of gigabytes: not on the event loop."""
        steps = list(self._groups)
        for old in [step for step in steps if step not in self._recent]:
            groups = [self._on_disk(group) for group in self._groups[old]] if old > self._committed else []
            if groups and None not in groups:
                self._groups[old] = [group for group in groups if group is not None]
            else:
                del self._groups[old], self._memory[old]
        for key in [key for key in list(self._packed) if key[0] not in self._recent]:
            del self._packed[key]
        for shard in [shard for shard in list(self._encoded) if shard.step not in self._recent]:
            self._encoded.pop(shard, None)  # `handed_over` may remove it at this moment

    def _pack(self, step: int, ranks: int) -> _Packed | None:
        groups, memory = self._groups.get(step), self._memory.get(step)
        if groups is None or memory is None:
            return None
        try:
            # Routed experts are most of a group. Those on disk stay there until they are sent.
            loaded = [group.experts_apart() for group in groups]
        except DamagedError as error:
            log.error("the batch of step %d cannot be served again, a group on disk is damaged: %s", step, error)
            return None
        stored = [array for _, arrays in loaded for array in arrays]
        packed = self._packed[step, ranks] = self._rows(step, [group for group, _ in loaded], stored, memory, ranks)
        return packed

    def _rows(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        stored: Sequence[StoredArray | None],
        memory: Memory,
        ranks: int,
    ) -> _Packed:
        recipe = self._recipe
        algorithm = self._algorithm.recalling(memory)
        # Tokens that are too old for this step stay as context.
        oldest = AgeLimit(recipe.orchestrator.max_off_policy_steps).oldest_version(step)
        groups = [group.without_older(oldest) for group in groups]
        docs = documents(groups, recipe.seq_len, step - 1, algorithm, self._temperatures, self._average)
        numbers: list[int] = []
        if self._recorder is not None:
            numbers = self._recorder.batch(step, groups, [Credited(doc.mask, doc.advantages) for doc in docs])
        docs = [
            doc if array is None else replace(doc, routed_experts=array.rows(0, len(doc)))
            for doc, array in zip(docs, stored, strict=True)
        ]
        lengths = RowLengths.of(recipe)
        info = BatchInfo(
            step,
            0,
            ranks,
            loss_tokens(docs),
            recipe.max_steps,
            has_images=any(doc.images for doc in docs),
            rows_at_once=0 if lengths.multiple is None else 1,
        )
        rows = (pack_trees if recipe.trainer.prefix_sharing else pack)(docs, lengths, ranks)
        trees = any(isinstance(each, PrefixTree) for mine in rows for row in mine for each in row.documents)
        common = Common.of(docs, recipe.orchestrator.sampling.temperature, has_branches=trees)
        return _Packed(info, rows, common, _kept_documents(rows, {id(docs[number]): number for number in numbers}))


def _kept_documents(ranks: Sequence[Sequence[PackedRow]], numbers: Mapping[int, int]) -> list[tuple[KeptDocument, ...]]:
    """Return where the rows of each rank have the documents with these numbers, given by `id`."""
    return [
        tuple(
            KeptDocument(numbers[id(doc)], index, start, len(doc), segment.start)
            for index, row in enumerate(rows)
            for start, segment in row.placed()
            if (doc := segment.document) is not None and segment.end == len(doc) and id(doc) in numbers
        )
        for rows in ranks
    ]


def _slim(group: SpooledGroup) -> RolloutGroup:
    return group.whole().slim()  # one expression, so that the whole group is freed before the next one is read


def documents(
    groups: Sequence[RolloutGroup],
    seq_len: int,
    version: int,
    algorithm: Algorithm,
    temperatures: Mapping[str, float] = MappingProxyType({}),
    average: Average = "tokens",
) -> list[Document]:
    """Return one document of at most `seq_len` tokens per sequence of a batch, for training policy `version`."""
    cut = [group.cut(seq_len) for group in groups]
    # Without routed experts, because those of groups on disk are not there either: the same groups get the same credit.
    credits = algorithm.assign([group.without_experts() for group in cut])
    scaled = scale_to_average(cut, credits, average, seq_len)
    return [
        Document(
            sequence.token_ids,
            credit.mask,
            sequence.logprobs,
            credit.advantages,
            # A rollout that was in flight during an update has KV of the older policy under its newer tokens.
            original.info.opened_version == version and not original.is_mixed,
            cross_entropy=credit.cross_entropy,
            routed_experts=sequence.routed_experts,
            ref_logprobs=sequence.ref_logprobs,
            images=sequence.info.images,
            temperature=temperatures.get(group.environment),
        )
        for before, group, of_group in zip(groups, cut, scaled, strict=True)
        for original, sequence, credit in zip(before.sequences, group.sequences, of_group, strict=True)
    ]


def loss_tokens(docs: Sequence[Document]) -> int:
    """Return the number of sampled tokens that are trained in a batch."""
    return sum(int(doc.mask.sum()) for doc in docs)


def scale_to_average(
    groups: Sequence[RolloutGroup], credits: Sequence[Sequence[Credit]], average: Average, seq_len: int
) -> Sequence[Sequence[Credit]]:
    """Scale advantages so that the trainer's sum over tokens becomes the requested average."""
    # The trainer divides the losses of a batch by its number N of trained tokens. Every policy gradient is proportional
    # to the advantage, so another average is a factor of the advantages, and no rank needs to know other ranks'
    # lengths. With n rollouts in the batch, and m trained tokens of the rollout (with several agents, of the trace),
    # the factor is N / (n * m) for `rollouts`, and N / (n * seq_len) for `seq_len`.
    if average == "tokens":
        return credits
    lengths = [_trained_lengths(group, of_group) for group, of_group in zip(groups, credits, strict=True)]
    rollouts = sum(length > 0 for of_group in lengths for length in of_group)
    tokens = sum(length for of_group in lengths for length in of_group)
    scaled = []
    for group, of_group, of_traces in zip(groups, credits, lengths, strict=True):
        per_sequence = [n for trace, n in zip(group.traces, of_traces, strict=True) for _ in trace]
        factors = [tokens / max(1, rollouts * (n if average == "rollouts" else seq_len)) for n in per_sequence]
        scaled.append(
            [
                replace(credit, advantages=(credit.advantages * factor).astype(np.float32))
                for credit, factor in zip(of_group, factors, strict=True)
            ]
        )
    return scaled


def _trained_lengths(group: RolloutGroup, credits: Sequence[Credit]) -> list[int]:
    """Return the number of trained tokens of each trace."""
    trained = iter([int(credit.mask.sum()) for credit in credits])
    return [sum(next(trained) for _ in trace) for trace in group.traces]
