"""Advantages by trace: an agent is compared with others in its own role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from primeslurm.orchestrator.algorithms.protocol import Credit
from primeslurm.orchestrator.rollouts.groups import RolloutGroup, traces_of
from primeslurm.wire.batches.rollout import Rollout

Rule = Callable[[Sequence[float]], Sequence[float]]


def per_trace(group: RolloutGroup, advantages: Sequence[float]) -> list[Credit]:
    """Give every sampled token of trace i the advantage `advantages[i]`, in the order of `group.traces`.

    Returns:
        One `Credit` for each sequence of the group, in the order of `group.sequences`.
    """
    pairs = zip(group.traces, advantages, strict=True)
    return [Credit.even(sequence, advantage) for trace, advantage in pairs for sequence in trace]


def by_role(group: RolloutGroup, rule: Rule, within_rollout: Sequence[str] = ()) -> list[float]:
    """Advantages that compare the traces of the same agent.

    Args:
        group: whose traces are compared.
        rule: rewards that are compared with one another to their advantages.
        within_rollout: agents whose traces are compared with those of the same rollout alone.

    Returns:
        One advantage for each trace, in the order of `group.traces`.
    """
    compared: dict[Hashable, list[int]] = defaultdict(list)
    rewards: list[float] = []
    for number, rollout in enumerate(group.rollouts):
        for trace in traces_of(rollout):
            agent = trace[0].info.agent
            compared[agent, number if agent in within_rollout else None].append(len(rewards))
            rewards.append(reward_of(trace))
    advantages = [0.0] * len(rewards)
    for members in compared.values():
        for i, advantage in zip(members, rule([rewards[i] for i in members]), strict=True):
            advantages[i] = advantage
    return advantages


def reward_of(trace: Sequence[Rollout]) -> float:
    """Return what advantages of a trace are made of."""
    return trace[0].info.net_reward
