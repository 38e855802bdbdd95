"""Decides which rollouts of a complete group are trained: length penalties, then filters of rollouts and groups."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from primeslurm.base.files import read_json
from primeslurm.base.model_files import model_directory
from primeslurm.orchestrator.algorithms import Algorithm
from primeslurm.orchestrator.dispatch.curricula import Curricula
from primeslurm.orchestrator.rollouts.groups import RolloutGroup, traces_of
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.filters import Filters, Gibberish, Length, Repetition, Truncated, ZeroAdvantage
from primeslurm.recipe.sections.length_penalties import Cost, LengthPenalty, Overlong, Relative
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.records.events.training import NothingKept
from primeslurm.records.journal import Journal
from primeslurm.records.metrics import Row
from primeslurm.wire.batches.frames import Bool
from primeslurm.wire.batches.rollout import Rollout

log = logging.getLogger(__name__)

# The token sequences of one rollout
Sequences = tuple[Rollout, ...]
ZERO_ADVANTAGE = "zero_advantage"
# Reason of a group that the filters of rollouts leave empty
FILTERED = "filtered"
# Write an event whenever this many batches' worth of consecutive rollouts were rejected
REJECTED_BATCHES = 4
# Advantages below this fraction of the largest reward are zero: the mean of equal rewards is off in its last bit.
ROUNDING = 1e-6
Trace = Sequence[Rollout]


@dataclass(frozen=True)
class RolloutFilter:
    """A filter of single rollouts."""

    name: str
    action: str
    applies: Callable[[Sequences], bool]


class FilterVerdict(NamedTuple):
    """The decision about a complete group."""

    trained: RolloutGroup | None  # The part that is trained. None: the group is rejected.
    rejected: str  # Reason of the rejection, as the suffix of its counter
    filtered: Counter[str]  # Rollouts by filter that applied to them; for zero_advantage, groups
    dropped: dict[str, str]  # Why rollouts are not trained, by id


@dataclass
class _Tally:
    """Counts of one environment since the last row of metrics."""

    rewards: list[float] = field(default_factory=list)
    groups: int = 0
    rejected: int = 0
    filtered: Counter[str] = field(default_factory=Counter)


class GroupFilter:
    """Decides about each complete group once. Curricula learn from every group, trained or not."""

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
        self._report_every = REJECTED_BATCHES * recipe.orchestrator.batch_size
        # Rollouts since the last group that is trained
        self._rejected_rollouts = 0
        self._reasons: Counter[str] = Counter()
        # Filtered rollouts (for zero_advantage, groups) of this process, for the state file
        self.counts: Counter[str] = Counter()

    def judge(self, group: RolloutGroup) -> FilterVerdict:
        """Apply length penalties and filters. Raise UsageError if the user's algorithm raised an error."""
        # This reads every token and changes nothing, so a thread may call it.
        group = apply_length_penalty(group, self._environments[group.environment])
        trained, counts, dropped = sift(group, self._filters[group.environment])
        rejected = FILTERED if trained is None else self._rejection(trained, counts)
        if rejected is not None:
            dropped = {rollout[0].info.id: rejected for rollout in group.rollouts} | dropped
        return FilterVerdict(trained if rejected is None else None, rejected or "", counts, dropped)

    def note(self, group: RolloutGroup, verdict: FilterVerdict) -> RolloutGroup | None:
        """Count a group and its verdict. Returns the part that is trained."""
        tally = self._tallies[group.environment]
        tally.groups += 1
        tally.rewards += group.given_rewards
        self._curricula.learn(group)
        tally.filtered += verdict.filtered
        self.counts += Counter({f"filtered_{name}": count for name, count in verdict.filtered.items()})
        if verdict.trained is not None:
            self._rejected_rollouts = 0
            self._reasons.clear()
            return verdict.trained
        tally.rejected += 1
        reports = self._rejected_rollouts // self._report_every
        self._rejected_rollouts += len(group.rollouts)
        self._reasons[verdict.rejected] += 1
        if self._rejected_rollouts // self._report_every > reports:
            self._journal.write(NothingKept(self._rejected_rollouts, dict(self._reasons)))
        return None

    def take_metrics(self) -> Row:
        """Return the metrics of each environment since the last row; means only if it had a group."""
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


def rollout_filters(filters: Filters, model: str) -> list[RolloutFilter]:
    """Return the filters of single rollouts. `model`: path of the policy, whose vocabulary size they may need."""
    return [
        RolloutFilter(each.type, each.action, _predicate(each, model))
        for each in filters
        if not isinstance(each, ZeroAdvantage)
    ]


class Sifted(NamedTuple):
    """The result of the filters of rollouts."""

    rest: RolloutGroup | None  # The rest of the group. None: no token of it is trained.
    counts: Counter[str]  # Rollouts by filter that applied
    dropped: dict[str, str]  # Filters that dropped a rollout, by its id


def sift(group: RolloutGroup, filters: Sequence[RolloutFilter]) -> Sifted:
    """Drop and mask rollouts of a group."""
    counts: Counter[str] = Counter()
    dropped: dict[str, str] = {}
    rest: list[Sequences] = []
    for rollout in group.rollouts:
        applied = [each for each in filters if each.applies(rollout)]
        counts.update(each.name for each in applied)
        actions = {each.action for each in applied}
        if "drop" in actions:
            dropped[rollout[0].info.id] = ", ".join(each.name for each in applied if each.action == "drop")
        else:
            rest.append(tuple(_masked(sequence) for sequence in rollout) if "mask" in actions else rollout)
    if not any(sequence.mask.any() for rollout in rest for sequence in rollout):
        return Sifted(None, counts, dropped)
    return Sifted(replace(group, rollouts=tuple(rest)), counts, dropped)


def has_advantage(group: RolloutGroup, algorithm: Algorithm, seq_len: int) -> bool:
    """Return whether an algorithm would train any token of the group, if a batch had no other groups."""
    (credits,) = algorithm.assign([group.cut(seq_len)])
    zero = ROUNDING * max(abs(reward) for reward in group.rewards)
    return any(
        bool((np.abs(credit.advantages[credit.mask]) > zero).any())
        or (credit.cross_entropy is not None and bool((credit.cross_entropy > 0).any()))
        for credit in credits
    )


def _predicate(each: Truncated | Length | Repetition | Gibberish, model: str) -> Callable[[Sequences], bool]:
    match each:
        case Truncated():
            return lambda rollout: any(sequence.info.finish_reason == "length" for sequence in rollout)
        case Length(min_tokens=min_tokens, max_tokens=max_tokens):
            upper = math.inf if max_tokens is None else max_tokens
            return lambda rollout: not min_tokens <= sum(int(sequence.mask.sum()) for sequence in rollout) <= upper
        case Repetition(run=run, probability=probability):
            return lambda rollout: any(_longest_run(one, math.log(probability)) >= run for one in rollout)
        case Gibberish(token_id=token_id, offset=offset):
            least = -math.log(each.vocabulary or _vocabulary_size(model) or max(token_id, 1)) - offset
            return lambda rollout: any(_has_gibberish(one, token_id, least) for one in rollout)


def _longest_run(sequence: Rollout, logprob: float) -> int:
    """Return the longest run of sampled tokens above a log-probability; other tokens do not interrupt it."""
    unsure = np.flatnonzero(sequence.logprobs[sequence.mask] <= logprob)
    edges = np.concatenate([[-1], unsure, [int(sequence.mask.sum())]])
    return int(np.diff(edges).max()) - 1


def _has_gibberish(sequence: Rollout, token_id: int, logprob: float) -> bool:
    rare: Bool = sequence.mask & (sequence.token_ids > token_id) & (sequence.logprobs < logprob)
    return bool(rare.any())


def _masked(sequence: Rollout) -> Rollout:
    observed = None if sequence.observed is None else np.zeros_like(sequence.observed)
    return replace(sequence, mask=np.zeros_like(sequence.mask), observed=observed)


def _vocabulary_size(model: str) -> int | None:
    directory = model_directory(model)
    config: dict[str, Any] = (read_json(directory / "config.json") if directory else None) or {}
    size = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(size, int):
        log.warning("the vocabulary size of %s is unknown; the gibberish filter works without it", model)
        return None
    return size


def _zero_advantage(recipe: Recipe, environment: Environment) -> str | None:
    """Return the action for groups without advantage. None for an environment of weight 0, which is only measured."""
    actions = [each.action for each in recipe.filters(environment) if each.type == ZERO_ADVANTAGE]
    return actions[0] if actions and environment.weight else None


def apply_length_penalty(group: RolloutGroup, environment: Environment) -> RolloutGroup:
    """Return a complete group with the penalty of each trace. Its rewards stay as the environment gave them."""
    penalty = environment.length_penalty
    if penalty is None:
        return group
    by_agent: dict[str, list[Trace]] = defaultdict(list)
    for trace in group.traces:
        by_agent[trace[0].info.agent].append(trace)
    losses = {
        id(trace[0]): amount
        for traces in by_agent.values()
        for trace, amount in zip(traces, length_penalties(traces, penalty, environment.solved_reward), strict=True)
    }
    rollouts = tuple(
        tuple(_with_penalty(sequence, losses[id(trace[0])]) for trace in traces_of(rollout) for sequence in trace)
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def length_penalties(traces: Sequence[Trace], penalty: LengthPenalty, solved_reward: float) -> list[float]:
    """Return the penalty of each trace, compared with all traces of its agent in the group; negative for a bonus."""
    lengths = np.array([sum(int(sequence.mask.sum()) for sequence in trace) for trace in traces], np.float64)
    rewards = np.array([trace[0].info.reward for trace in traces], np.float64)
    match penalty:
        case Overlong():
            excess = lengths - (penalty.max_tokens - penalty.buffer)
            lost = penalty.factor * np.clip(excess / penalty.buffer, 0, 1)
        case Relative():
            spread = lengths.max() - lengths.min()
            share = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros(len(lengths))
            lost = -penalty.factor * np.where(rewards >= solved_reward, share, np.minimum(0, share))
        case Cost():
            turns = np.array([trace[0].info.turns for trace in traces], np.float64)
            spent = penalty.tokens * lengths / max(1, lengths.max()) + penalty.turns * turns / turns.max()
            lost = float(np.clip(rewards.mean(), 0, 1)) * spent
    return [float(value) for value in lost]


def _with_penalty(sequence: Rollout, amount: float) -> Rollout:
    return replace(sequence, info=msgspec.structs.replace(sequence.info, length_penalty=amount))
