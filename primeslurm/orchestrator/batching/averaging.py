"""What advantages are averaged over: all tokens alike, all rollouts alike, or a constant length.

The trainer divides a batch's losses by its number of trained tokens N. Every policy gradient is proportional to the
advantage, so another average is another factor of the advantages: no rank has to know more than it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from primeslurm.orchestrator.algorithms import Credit
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.losses import Average


def averaged(
    groups: Sequence[RolloutGroup], credits: Sequence[Sequence[Credit]], average: Average, seq_len: int
) -> Sequence[Sequence[Credit]]:
    """Scale advantages so that their sum over N is the average that is asked for.

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
