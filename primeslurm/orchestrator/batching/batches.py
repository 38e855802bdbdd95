"""The batches that the trainer may still ask for: formed once, then the same however often they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.orchestrator.algorithms import Algorithm
from primeslurm.orchestrator.batching.documents import documents
from primeslurm.orchestrator.batching.packing import loss_tokens, pack
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.rollouts import Batch, BatchInfo

KEPT_STEPS = 2
"""Packed batches kept: the step being trained and the one before."""


class Batches:
    """Rows of every rank by step. Packing is deterministic, so a restart packs the same rows from the same groups."""

    def __init__(self, recipe: Recipe, algorithm: Algorithm) -> None:
        self._recipe = recipe
        self._algorithm = algorithm
        self._groups: dict[int, list[RolloutGroup]] = {}
        self._packed: dict[tuple[int, int], list[Batch]] = {}

    def add(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """The groups that `step` trains on."""
        self._groups[step] = list(groups)
        for old in [s for s in self._groups if s <= step - KEPT_STEPS]:
            del self._groups[old]
        self._packed = {key: value for key, value in self._packed.items() if key[0] in self._groups}

    def groups(self, step: int) -> list[RolloutGroup] | None:
        """The groups of a step, if it is still kept."""
        return self._groups.get(step)

    def get(self, step: int, rank: int, ranks: int) -> Batch | None:
        """The rows of one rank, or None if there is no such batch (any more)."""
        if step not in self._groups:
            return None
        if (step, ranks) not in self._packed:
            self._packed[step, ranks] = self._pack(step, ranks)
        return self._packed[step, ranks][rank]

    def _pack(self, step: int, ranks: int) -> list[Batch]:
        seq_len, max_steps = self._recipe.seq_len, self._recipe.max_steps
        docs = documents(self._groups[step], seq_len, step - 1, self._algorithm)
        total = loss_tokens(docs)
        rows = pack(docs, seq_len, ranks, self._recipe.orchestrator.sampling.temperature)
        seen = any(doc.images for doc in docs)
        return [Batch(BatchInfo(step, rank, ranks, total, max_steps, seen), mine) for rank, mine in enumerate(rows)]
