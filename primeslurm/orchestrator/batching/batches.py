"""The batches that the trainer may still ask for: formed once, then the same however often they are asked for.

The groups of a batch become the sequences that are trained as the run's algorithm says; packing makes rows of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from primeslurm.orchestrator.algorithms import Algorithm, Credit, Memory
from primeslurm.orchestrator.batching.averaging import averaged
from primeslurm.orchestrator.batching.packing import Document, loss_tokens, pack
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.losses import Average, CustomLoss
from primeslurm.wire.rollouts import Batch, BatchInfo, Rollout

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
        docs = documents(self._groups[step], seq_len, step - 1, algorithm, self._temperatures, self._average)
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
