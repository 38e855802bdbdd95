"""Length penalties: what traces lose of their reward, once their group is complete. See `recipe.sections`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from primeslurm.orchestrator.rollouts.groups import RolloutGroup, traces_of
from primeslurm.recipe.sections.length_penalties import Cost, LengthPenalty, Overlong, Relative
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.wire.batches.rollout import Rollout

Trace = Sequence[Rollout]


def penalised(group: RolloutGroup, environment: Environment) -> RolloutGroup:
    """Return a complete group whose traces know what they lose; rewards stay as the environment gave them.

    Args:
        group: whole, not cut to what can be trained.
        environment: its own.
    """
    penalty = environment.length_penalty
    if penalty is None:
        return group
    by_agent: dict[str, list[Trace]] = defaultdict(list)
    for trace in group.traces:
        by_agent[trace[0].info.agent].append(trace)
    lost = {
        id(trace[0]): amount
        for traces in by_agent.values()
        for trace, amount in zip(traces, amounts(traces, penalty, environment.solved_reward), strict=True)
    }
    rollouts = tuple(
        tuple(_losing(sequence, lost[id(trace[0])]) for trace in traces_of(rollout) for sequence in trace)
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def amounts(traces: Sequence[Trace], penalty: LengthPenalty, solved_reward: float) -> list[float]:
    """What each trace loses, among all of an agent in a group. Negative: it gains."""
    lengths = np.array([sum(int(sequence.mask.sum()) for sequence in trace) for trace in traces], np.float64)
    rewards = np.array([trace[0].info.reward for trace in traces], np.float64)
    match penalty:
        case Overlong():
            over = lengths - (penalty.max_tokens - penalty.buffer)
            lost = penalty.factor * np.clip(over / penalty.buffer, 0, 1)
        case Relative():
            spread = lengths.max() - lengths.min()
            share = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros(len(lengths))
            lost = -penalty.factor * np.where(rewards >= solved_reward, share, np.minimum(0, share))
        case Cost():
            turns = np.array([trace[0].info.turns for trace in traces], np.float64)
            spent = penalty.tokens * lengths / max(1, lengths.max()) + penalty.turns * turns / turns.max()
            lost = float(np.clip(rewards.mean(), 0, 1)) * spent
    return [float(value) for value in lost]


def _losing(sequence: Rollout, amount: float) -> Rollout:
    return replace(sequence, info=msgspec.structs.replace(sequence.info, length_penalty=amount))
