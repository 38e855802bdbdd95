"""Draws faults and their order from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule."""

    kind: str
    seed: int
    """Determines target and duration, among the targets at the time."""
    after_s: float = 0.0
    """Seconds after the first fault of its round."""

    def rng(self) -> random.Random:
        """Random generator of the fault's own choices."""
        return random.Random(self.seed)


Round = tuple[Fault, ...]
"""Overlapping faults. The next round begins when the run has recovered."""


def schedule(seed: int, faults: int, kinds: Sequence[str], overlap: float) -> list[Round]:
    """Draw the rounds.

    Every kind comes once before any comes twice, so that even a few faults are of many kinds.

    Args:
        kinds: names, in an order that never changes.
        overlap: probability that a fault overlaps with the previous one.
    """
    rng = random.Random(seed)
    names: list[str] = []
    while len(names) < faults:
        names += rng.sample(list(kinds), len(kinds))
    rounds: list[Round] = []
    for name in names[:faults]:
        seed_of_fault, joins, after_s = rng.getrandbits(32), rng.random() < overlap, round(rng.uniform(0.0, 10.0), 1)
        if joins and rounds and len(rounds[-1]) == 1:
            rounds[-1] = (*rounds[-1], Fault(name, seed_of_fault, after_s))
        else:
            rounds.append((Fault(name, seed_of_fault),))
    return rounds
