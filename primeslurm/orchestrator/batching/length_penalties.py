"""Length penalties: what each trace of a complete group loses of its reward. See `recipe.sections.length_penalties`."""

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
        for trace, amount in zip(traces, amounts(traces, penalty, environment.solved_reward), strict=True)
    }
    rollouts = tuple(
        tuple(_with_penalty(sequence, losses[id(trace[0])]) for trace in traces_of(rollout) for sequence in trace)
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def amounts(traces: Sequence[Trace], penalty: LengthPenalty, solved_reward: float) -> list[float]:
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
