"""The batches that the trainer may still ask for: formed once, then the same however often they are asked for.

The groups of a batch become the sequences that are trained as the run's algorithm says; packing makes
rows of these, the same number for every data-parallel rank.
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
from primeslurm.orchestrator.batching.packing import Common, Document, PackedRow, encode, pack, quantum
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import SpooledGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.losses import Average, CustomLoss
from primeslurm.wire.batches.batch import BatchInfo, RankShard
from primeslurm.wire.batches.file_ranges import FrameSource, StoredArray
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.link.messages import Answer

log = logging.getLogger(__name__)
KEPT_STEPS = 2
"""Batches kept in memory: the step being trained and the one before, or those that were asked for last."""


class StepShard(NamedTuple):
    """What one rank gets of a step's batch."""

    step: int
    shard: RankShard


@dataclass(frozen=True)
class _Packed:
    """The rows of all ranks, by rank."""

    info: BatchInfo
    rows: list[list[PackedRow]]
    common: Common


class Batches:
    """Rows of every rank by step. Packing is deterministic, so a restart packs the same rows from the same groups.

    Args:
        recipe: of the run.
        algorithm: assigns credit.
        on_disk: returns a group as it is on disk; None if it is not there. Default: none is.
        committed: the last step that is: none before will be asked for.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        on_disk: Callable[[RolloutGroup], RolloutGroup | None] = lambda group: None,
        committed: int = 0,
    ) -> None:
        self._recipe = recipe
        self._on_disk = on_disk
        self._committed = committed
        self._using = threading.Lock()
        """Held for moments only, as the event loop takes it, too."""
        self._recent: list[int] = []
        """Steps whose batches may be in memory."""
        self._algorithm = algorithm
        self._temperatures = {each.label: recipe.sampling(each).temperature for each in recipe.environments}
        loss = recipe.trainer.loss
        self._average: Average = "tokens" if isinstance(loss, CustomLoss) else loss.average
        self._groups: dict[int, list[RolloutGroup]] = {}
        self._memory: dict[int, Memory] = {}
        self._packed: dict[tuple[int, int], _Packed] = {}
        self._encoded: dict[StepShard, list[FrameSource]] = {}
        self._encoding: dict[StepShard, asyncio.Task[list[FrameSource] | None]] = {}
        self._thread = ThreadPoolExecutor(1, "packing")
        """One: requests of a batch's other ranks wait for its packing, and nothing else does."""

    def add(self, step: int, groups: Sequence[RolloutGroup], memory: Memory | None = None) -> None:
        """Keep the groups that `step` trains on.

        Those of earlier steps are kept on disk until they are committed, as soon as a share of `step` is asked for: a
        trainer that is started again asks for them. What is not on disk is forgotten.

        Args:
            step: that asks for them.
            groups: of its batch.
            memory: what the algorithm knew before it. None: nothing.
        """
        self._use(step)  # first, or a thread that trims would take it for an old one
        self._groups[step], self._memory[step] = list(groups), memory or {}

    def committed(self, step: int) -> None:
        """Note that no step up to this one is asked for any more."""
        self._committed = max(step, self._committed)

    def handed_over(self, share: StepShard) -> None:
        """Forget how a share is encoded, as it will not be asked for here again."""
        self._encoded.pop(share, None)

    def _use(self, step: int) -> None:
        """Let a step's batch be in memory, in place of the one that was asked for longest ago."""
        with self._using:
            self._recent = [*(other for other in self._recent if other != step), step][-KEPT_STEPS:]

    def _trim(self) -> None:
        """Have no other batch in memory. It opens files, and gives tens of gigabytes back: not for the event loop."""
        known = list(self._groups)
        for old in [step for step in known if step not in self._recent]:
            kept = [self._on_disk(group) for group in self._groups[old]] if old > self._committed else []
            if kept and None not in kept:
                self._groups[old] = [group for group in kept if group is not None]
            else:
                del self._groups[old], self._memory[old]
        for packed in [key for key in list(self._packed) if key[0] not in self._recent]:
            del self._packed[packed]
        for share in [key for key in list(self._encoded) if key.step not in self._recent]:
            self._encoded.pop(share, None)  # it may be handed over at this moment

    async def answer(self, share: StepShard, within_s: float) -> list[FrameSource] | Answer | None:
        """As `serve`, or say that it takes longer: a batch on disk is read first, which may take minutes.

        Args:
            share: that a rank asks for.
            within_s: who asks waits no longer; what was begun goes on.

        Returns:
            None if there is no such batch (any more).

        Raises:
            UsageError: an algorithm of the user's own made an error.
        """
        if (known := self.encoded(share)) is not None:  # a repeat, or the next chunk
            return known
        encoding = self._encoding.get(share)
        if encoding is None:
            encoding = self._encoding[share] = asyncio.create_task(self.serve(share))
            encoding.add_done_callback(lambda _: self._encoding.pop(share))
        done, _ = await asyncio.wait([encoding], timeout=within_s)
        return encoding.result() if done else Answer("wait")

    async def serve(self, share: StepShard) -> list[FrameSource] | None:
        """As `get`, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.get, share)

    async def read(self, step: int) -> list[RolloutGroup]:
        """Return the groups of a step, for what is said about them; none if they are not kept any more.

        Those on disk are read one after another, in a thread, and come without routed experts: the batch stays there.
        """
        groups = self._groups.get(step, [])
        try:
            return [await asyncio.to_thread(_slim, one) if isinstance(one, SpooledGroup) else one for one in groups]
        except DamagedError as error:
            log.error("nothing is said about the batch of step %d, a group on disk is damaged: %s", step, error)
            return []

    def close(self) -> None:
        """Pack and encode nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def encoded(self, share: StepShard) -> list[FrameSource] | None:
        """Return what was encoded before; None if it was not."""
        return self._encoded.get(share)

    def get(self, share: StepShard) -> list[FrameSource] | None:
        """Return what a rank gets, encoded, or None if there is no such batch (any more).

        It may take seconds, and may run in a thread beside `add`; not beside itself.

        Raises:
            UsageError: an algorithm of the user's own made an error.
        """
        if (known := self._encoded.get(share)) is not None:
            return known
        step, shard = share
        if step in self._groups and step > self._committed and step not in self._recent:
            self._use(step)
        self._trim()  # before it is read: others make room for it
        packed = self._packed.get((step, shard.dp_world)) or self._pack(step, shard.dp_world)
        if packed is None:
            return None
        info = msgspec.structs.replace(packed.info, **msgspec.structs.asdict(shard))
        frames = self._encoded[share] = encode(packed.rows[shard.dp_rank], info, packed.common)
        return frames

    def _pack(self, step: int, ranks: int) -> _Packed | None:
        """Pack the batch of a step, if it is there. Routed experts that are on disk stay there until they are sent."""
        found, memory = self._groups.get(step), self._memory.get(step)
        if found is None or memory is None:
            return None
        try:
            taken = [group.experts_apart() for group in found]
        except DamagedError as error:
            log.error("the batch of step %d cannot be given again, a group on disk is damaged: %s", step, error)
            return None
        groups, stored = [group for group, _ in taken], [array for _, arrays in taken for array in arrays]
        packed = self._packed[step, ranks] = self._rows(step, groups, stored, memory, ranks)
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
        oldest = step - 1 - recipe.orchestrator.max_off_policy_steps
        groups = [group.without_older(oldest) for group in groups]
        docs = documents(groups, recipe.seq_len, step - 1, algorithm, self._temperatures, self._average)
        docs = [
            doc if array is None else replace(doc, routed_experts=array.rows(0, len(doc)))
            for doc, array in zip(docs, stored, strict=True)
        ]
        smallest = quantum(recipe)
        info = BatchInfo(
            step,
            0,
            ranks,
            loss_tokens(docs),
            recipe.max_steps,
            has_images=any(doc.images for doc in docs),
            rows_at_once=0 if smallest is None else 1,
        )
        rows = pack(docs, recipe.seq_len, ranks, smallest)
        return _Packed(info, rows, Common.of(docs, recipe.orchestrator.sampling.temperature))


def _slim(group: SpooledGroup) -> RolloutGroup:
    return group.whole().slim()  # in one expression: what is not kept is gone before the next one is read


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
    # without experts, as are groups of which those are on disk: the same groups, the same credit
    credits = algorithm.assign([group.without_experts() for group in cut])
    found = averaged(cut, credits, average, seq_len)
    return [
        _document(sequence, credit, _is_on_policy(original, version), temperatures.get(group.environment))
        for before, group, mine in zip(groups, cut, found, strict=True)
        for original, sequence, credit in zip(before.sequences, group.sequences, mine, strict=True)
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


def loss_tokens(docs: Sequence[Document]) -> int:
    """Count the sampled tokens that are trained, in the whole batch."""
    return sum(int(doc.mask.sum()) for doc in docs)


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
