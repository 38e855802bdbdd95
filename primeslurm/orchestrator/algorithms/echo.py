"""Echo: train the tokens that environments sent with cross-entropy, beside another algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from primeslurm.orchestrator.algorithms.protocol import Credit, Wrapper
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.frames import Float32
from primeslurm.wire.batches.rollout import Rollout


@dataclass(frozen=True)
class Echo(Wrapper):
    """Adds weight * mean cross-entropy of the batch's observed tokens to another algorithm's loss (prime-rl's echo).

    Observed tokens are those of the environment's messages after the first reply. The trainer divides the sum of a
    batch's losses by its N tokens in `mask`, so each of the M observed tokens gets the factor weight * N / M.
    """

    weight: float
    needs_observed = True

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        credits = self.inner.assign(groups)
        trained = sum(int(credit.mask.sum()) for of_group in credits for credit in of_group)
        observed = sum(int(_observed(sequence).sum()) for group in groups for sequence in group.sequences)
        # max(1, trained), because the trainer divides by 1 if a batch has no trained tokens.
        factor = self.weight * max(1, trained) / max(1, observed)
        return [
            [_add(credit, sequence, factor) for credit, sequence in zip(of_group, group.sequences, strict=True)]
            for of_group, group in zip(credits, groups, strict=True)
        ]


def _add(credit: Credit, sequence: Rollout, factor: float) -> Credit:
    added: Float32 = np.where(_observed(sequence), factor, 0.0).astype(np.float32)
    return replace(credit, cross_entropy=added if credit.cross_entropy is None else credit.cross_entropy + added)


def _observed(sequence: Rollout) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    # Rollouts from before `echo` was added to a running recipe have no marks.
    return np.zeros(len(sequence.token_ids), np.bool_) if sequence.observed is None else sequence.observed
