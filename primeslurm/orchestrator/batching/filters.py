"""Which rollouts of a complete group are trained. Pure; linear in tokens, in numpy."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from primeslurm.base.files import read_json
from primeslurm.base.model_files import model_directory
from primeslurm.orchestrator.algorithms import Algorithm
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe.sections.filters import Filters, Gibberish, Length, Repetition, Truncated, ZeroAdvantage
from primeslurm.wire.batches.frames import Bool
from primeslurm.wire.batches.rollout import Rollout

log = logging.getLogger(__name__)

Sequences = tuple[Rollout, ...]
"""One rollout: its token sequences."""
ROUNDING = 1e-6
"""Advantages below this, times the largest reward, are zeros: the mean of equal rewards may be off in its last bit."""


@dataclass(frozen=True)
class RolloutFilter:
    """One filter of rollouts, ready to be asked."""

    name: str
    action: str
    applies: Callable[[Sequences], bool]


def rollout_filters(filters: Filters, model: str) -> list[RolloutFilter]:
    """Make what is asked of each rollout. `model`: path of the policy's, whose vocabulary may have to be known."""
    return [
        RolloutFilter(each.type, each.action, _question(each, model))
        for each in filters
        if not isinstance(each, ZeroAdvantage)
    ]


def sift(group: RolloutGroup, filters: Sequence[RolloutFilter]) -> tuple[RolloutGroup | None, Counter[str]]:
    """Take from a group what filters leave out.

    Returns:
        The group without dropped rollouts and with masked ones masked, or None if no token of it would be trained; and
        to how many rollouts each filter applied.
    """
    counts: Counter[str] = Counter()
    kept: list[Sequences] = []
    for rollout in group.rollouts:
        found = [each for each in filters if each.applies(rollout)]
        counts.update(each.name for each in found)
        actions = {each.action for each in found}
        if "drop" not in actions:
            kept.append(tuple(_masked(sequence) for sequence in rollout) if "mask" in actions else rollout)
    if not any(sequence.mask.any() for rollout in kept for sequence in rollout):
        return None, counts
    return replace(group, rollouts=tuple(kept)), counts


def has_advantage(group: RolloutGroup, algorithm: Algorithm, seq_len: int) -> bool:
    """Tell whether an algorithm finds anything to train in a group, were it alone in a batch."""
    (credits,) = algorithm.assign([group.cut(seq_len)])
    zero = ROUNDING * max(abs(reward) for reward in group.rewards)
    return any(
        bool((np.abs(credit.advantages[credit.mask]) > zero).any())
        or (credit.cross_entropy is not None and bool((credit.cross_entropy > 0).any()))
        for credit in credits
    )


def _question(each: Truncated | Length | Repetition | Gibberish, model: str) -> Callable[[Sequences], bool]:
    match each:
        case Truncated():
            return lambda rollout: any(sequence.info.finish_reason == "length" for sequence in rollout)
        case Length(min_tokens=fewest, max_tokens=most):
            top = math.inf if most is None else most
            return lambda rollout: not fewest <= sum(int(sequence.mask.sum()) for sequence in rollout) <= top
        case Repetition(run=run, probability=probability):
            return lambda rollout: any(_longest_run(one, math.log(probability)) >= run for one in rollout)
        case Gibberish(token_id=token_id, offset=offset):
            least = -math.log(each.vocabulary or _vocabulary(model) or max(token_id, 1)) - offset
            return lambda rollout: any(_out_of_nowhere(one, token_id, least) for one in rollout)


def _longest_run(sequence: Rollout, logprob: float) -> int:
    """Of sampled tokens in a row that are likelier than that; what is not sampled is passed over."""
    unsure = np.flatnonzero(sequence.logprobs[sequence.mask] <= logprob)
    edges = np.concatenate([[-1], unsure, [int(sequence.mask.sum())]])
    return int(np.diff(edges).max()) - 1


def _out_of_nowhere(sequence: Rollout, token_id: int, logprob: float) -> bool:
    found: Bool = sequence.mask & (sequence.token_ids > token_id) & (sequence.logprobs < logprob)
    return bool(found.any())


def _masked(sequence: Rollout) -> Rollout:
    """A sequence of which no token is trained, sampled or observed."""
    observed = None if sequence.observed is None else np.zeros_like(sequence.observed)
    return replace(sequence, mask=np.zeros_like(sequence.mask), observed=observed)


def _vocabulary(model: str) -> int | None:
    directory = model_directory(model)
    config: dict[str, Any] = (read_json(directory / "config.json") if directory else None) or {}
    found = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(found, int):
        log.warning("the size of the vocabulary of %s is not known: gibberish is looked for without it", model)
        return None
    return found
