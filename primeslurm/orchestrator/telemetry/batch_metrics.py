"""Metrics of a batch for its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.records.metrics import Row
from primeslurm.wire.batches.rollout import Rollout


def reward_mean(groups: Sequence[RolloutGroup]) -> float:
    return float(np.mean([reward for group in groups for reward in group.given_rewards]))


def oldest_age(groups: Sequence[RolloutGroup], step: int) -> float:
    return float(max(step - 1 - group.opened_version for group in groups))


def batch_metrics(groups: Sequence[RolloutGroup], step: int, seq_len: int) -> Row:
    """Return the metrics of a batch. Staleness is in policy versions: step s trains version s-1."""
    # For a large batch with a teacher this takes 0.1 s, so it is called outside of the event loop.
    rewards = np.array([reward for group in groups for reward in group.given_rewards])
    branches = [branch for group in groups for branch in group.sequences]
    staleness = np.array([step - 1 - group.opened_version for group in groups])
    age = np.array([step - 1 - branch.oldest_version for branch in branches])
    lengths = np.array([len(branch.token_ids) for branch in branches])
    sampled = np.array([int(branch.mask.sum()) for branch in branches])
    sequences = [len(rollout) for group in groups for rollout in group.rollouts]
    row = {
        "reward/mean": reward_mean(groups),
        "reward/std": rewards.std(),
        "staleness/mean": staleness.mean(),
        "staleness/max": oldest_age(groups, step),
        "staleness/oldest_token_max": age.max(),
        "rollouts/mixed_version": sum(branch.is_mixed for branch in branches),
        "rollouts/length_mean": lengths.mean(),
        "rollouts/sampled_mean": sampled.mean(),
        "rollouts/cut_off": np.mean([branch.info.finish_reason == "length" for branch in branches]),
        "rollouts/longer_than_seq_len": np.mean(lengths > seq_len),
        "rollouts/turns_mean": np.mean([branch.info.turns for branch in branches]),
        "rollouts/sequences_mean": np.mean(sequences),
        "rollouts/sequences_max": max(sequences),
        "rollouts/seconds_mean": np.mean([branch.info.seconds for branch in branches]),
        "groups/zero_signal": np.mean([not group.has_signal for group in groups]),
        **_by_environment(groups),
        **_length_penalties(groups),
        **_teacher_kl(branches),
        **_tokens_without_replay(branches),
    }
    return {name: float(value) for name, value in row.items()}


def _teacher_kl(branches: Sequence[Rollout]) -> Row:
    """Return teacher/kl, which estimates KL(policy || teacher): mean of log p_engine - log p_teacher of samples."""
    scored = [(branch, branch.ref_logprobs) for branch in branches if branch.ref_logprobs is not None]
    gaps = [(branch.logprobs - ref)[branch.mask] for branch, ref in scored]
    return {"teacher/kl": float(np.concatenate(gaps).mean())} if gaps else {}


def _tokens_without_replay(branches: Sequence[Rollout]) -> Row:
    """Return the fractions of tokens whose experts repeated and whose experts the engines did not return."""
    infos, tokens = [branch.info for branch in branches], sum(len(branch.token_ids) for branch in branches)
    row = {
        "router_replay/repeated": sum(info.repeated_experts for info in infos) / tokens,
        "router_replay/unknown": sum(info.unknown_experts for info in infos) / tokens,
    }
    return {name: fraction for name, fraction in row.items() if fraction}


def _length_penalties(groups: Sequence[RolloutGroup]) -> Row:
    lost = np.array([trace[0].info.length_penalty for group in groups for trace in group.traces])
    return {"length_penalty/mean": lost.mean(), "length_penalty/fraction": (lost > 0).mean()} if lost.any() else {}


def _by_environment(groups: Sequence[RolloutGroup]) -> Row:
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        values[f"{group.environment}/reward"] += group.given_rewards
        infos = [trace[0].info for trace in group.traces]
        has_agents = len({info.agent for info in infos}) > 1
        for info in infos:
            prefix = f"{group.environment}/{info.agent}" if has_agents else group.environment
            if has_agents:
                values[f"{prefix}/reward"].append(info.reward)
            for name, value in info.metrics.items():
                values[f"{prefix}/{name}"].append(value)
    return {name: float(np.mean(items)) for name, items in values.items()}
