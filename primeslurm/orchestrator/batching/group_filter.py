"""What becomes of complete groups: which are trained, and what all of them say about their environments."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from primeslurm.orchestrator.algorithms import Algorithm
from primeslurm.orchestrator.batching.filters import has_advantage, rollout_filters, sift
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.records.events.training import NothingKept
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import Row

ZERO_ADVANTAGE = "zero_advantage"
FILTERED = "filtered"
"""Why a group is rejected of which filters leave nothing."""
REJECTED_BATCHES = 4
"""So many batches' worth of rollouts in a row, of which nothing is kept, are told of."""


@dataclass
class _Tally:
    """Of one environment since the last row."""

    rewards: list[float] = field(default_factory=list)
    groups: int = 0
    rejected: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    """Rollouts by filter; for zero_advantage, groups."""


class FilterVerdict(NamedTuple):
    """What is to become of a complete group."""

    kept: RolloutGroup | None
    """What of it is trained; None if it is rejected."""
    reason: str
    """Why it is rejected, as a word for its counter."""
    filtered: Counter[str]
    """Rollouts by filter that applied to them; for zero_advantage, groups."""


class GroupFilter:
    """Decides about each complete group, once, and counts.

    Args:
        recipe: of the run.
        algorithm: which may reject groups, too.
        curricula: which learn from every group, whether it is trained or not.
        journal: is told when nothing is kept any more.
    """

    def __init__(self, recipe: Recipe, algorithm: Algorithm, curricula: Curricula, journal: Journal) -> None:
        self._algorithm = algorithm
        self._curricula = curricula
        self._journal = journal
        self._seq_len = recipe.seq_len
        self._environments = {each.label: each for each in recipe.environments}
        self._filters = {
            each.label: rollout_filters(recipe.filters(each), recipe.model.path) for each in recipe.environments
        }
        self._zero_advantage = {each.label: _zero_advantage(recipe, each) for each in recipe.environments}
        self._tallies = {each.label: _Tally() for each in recipe.environments}
        self._patience = REJECTED_BATCHES * recipe.orchestrator.batch_size
        self._in_vain = 0
        self._reasons: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Rollouts by filter that applied to them (for zero_advantage, groups), of this process."""

    def judge(self, group: RolloutGroup) -> FilterVerdict:
        """Find what of a complete group is trained. It looks at every token, and changes nothing: threads may call it.

        Raises:
            UsageError: an algorithm of the user's own made an error.
        """
        kept, counts = sift(group, self._filters[group.environment])
        reason = FILTERED if kept is None else self._rejection(kept, counts)
        return FilterVerdict(kept if reason is None else None, reason or "", counts)

    def note(self, group: RolloutGroup, verdict: FilterVerdict) -> RolloutGroup | str:
        """Count a complete group, and what was found of it.

        Returns:
            The group, without what filters leave out; or why it is rejected, as a word for its counter.
        """
        tally = self._tallies[group.environment]
        tally.groups += 1
        tally.rewards += group.given_rewards
        self._curricula.learn(group)
        tally.filtered += verdict.filtered
        self.counts += Counter({f"filtered_{name}": count for name, count in verdict.filtered.items()})
        if verdict.kept is not None:
            self._in_vain = 0
            self._reasons.clear()
            return verdict.kept
        tally.rejected += 1
        self._note_rejected(len(group.rollouts), verdict.reason)
        return verdict.reason

    def take_metrics(self) -> Row:
        """Compute what was seen since the last row, by environment. An environment without a group has no means."""
        row: Row = {}
        for label, tally in self._tallies.items():
            solved = self._environments[label].solved_reward
            means: Row = {}
            if tally.rewards:
                rewards = np.array(tally.rewards)
                means = {"reward": float(rewards.mean()), "solve_rate": float((rewards >= solved).mean())}
            counts = {"groups": tally.groups, "groups_rejected": tally.rejected}
            names = [each.name for each in self._filters[label]]
            names += [ZERO_ADVANTAGE] if self._zero_advantage[label] else []
            counts |= {f"filters/{name}": tally.filtered[name] for name in names}
            row |= {f"env/{label}/{name}": float(value) for name, value in (means | counts).items()}
            self._tallies[label] = _Tally()
        return row | self._curricula.take_metrics()

    def _rejection(self, group: RolloutGroup, counts: Counter[str]) -> str | None:
        action = self._zero_advantage[group.environment]
        if action and not has_advantage(group, self._algorithm, self._seq_len):
            counts[ZERO_ADVANTAGE] += 1
            if action == "drop":
                return ZERO_ADVANTAGE
        return self._algorithm.rejects(group)

    def _note_rejected(self, rollouts: int, reason: str) -> None:
        before = self._in_vain // self._patience
        self._in_vain += rollouts
        self._reasons[reason] += 1
        if self._in_vain // self._patience > before:
            self._journal.write(NothingKept(self._in_vain, dict(self._reasons)))


def _zero_advantage(recipe: Recipe, environment: Environment) -> str | None:
    """What to do with an environment's groups without any advantage. Those of weight 0 are there to be measured."""
    found = [each.action for each in recipe.filters(environment) if each.type == ZERO_ADVANTAGE]
    return found[0] if found and environment.weight else None
