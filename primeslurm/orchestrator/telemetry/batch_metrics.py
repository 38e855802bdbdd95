"""What a batch says about itself, as metrics of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.records.metrics import Row
from primeslurm.wire.batches.rollout import Rollout


def reward_mean(groups: Sequence[RolloutGroup]) -> float:
    """Compute the mean reward of a batch, which is its metric reward/mean."""
    return float(np.mean([reward for group in groups for reward in group.given_rewards]))


def oldest_age(groups: Sequence[RolloutGroup], step: int) -> float:
    """Compute the greatest staleness of a batch's groups, which is its metric staleness/max."""
    return float(max(step - 1 - group.opened_version for group in groups))


def batch_metrics(groups: Sequence[RolloutGroup], step: int, seq_len: int) -> Row:
    """Compute what a batch says about itself. Staleness is in policy versions: step s trains version s-1.

    It looks at every token, which takes a tenth of a second for a large batch with a teacher: not for the event loop.

    Args:
        groups: of the batch.
        step: that trains on it.
        seq_len: longest document [tokens]; longer sequences are counted.
    """
    rewards = np.array([reward for group in groups for reward in group.given_rewards])
    branches = [branch for group in groups for rollout in group.rollouts for branch in rollout]
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
        **_penalties(groups),
        **_distance(branches),
        **_repeated_experts(branches),
    }
    return {name: float(value) for name, value in row.items()}


def _distance(branches: Sequence[Rollout]) -> Row:
    """teacher/kl: mean of log p_engine - log p_teacher over sampled tokens, an estimate of KL(policy || teacher)."""
    asked = [(branch, branch.ref_logprobs) for branch in branches if branch.ref_logprobs is not None]
    gaps = [(branch.logprobs - ref)[branch.mask] for branch, ref in asked]
    return {"teacher/kl": float(np.concatenate(gaps).mean())} if gaps else {}


def _repeated_experts(branches: Sequence[Rollout]) -> Row:
    """Return router_replay/repeated: fraction of tokens that are not replayed because their experts repeated."""
    repeated = sum(branch.info.repeated_experts for branch in branches)
    tokens = sum(len(branch.token_ids) for branch in branches)
    return {"router_replay/repeated": repeated / tokens} if repeated else {}


def _penalties(groups: Sequence[RolloutGroup]) -> Row:
    """length_penalty/mean: what traces lost of their reward; length_penalty/fraction: of traces that lost something."""
    lost = np.array([trace[0].info.length_penalty for group in groups for trace in group.traces])
    return {"length_penalty/mean": lost.mean(), "length_penalty/fraction": (lost > 0).mean()} if lost.any() else {}


def _by_environment(groups: Sequence[RolloutGroup]) -> Row:
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        values[f"{group.environment}/reward"] += group.given_rewards
        infos = [trace[0].info for trace in group.traces]
        several = len({info.agent for info in infos}) > 1
        for info in infos:
            of = f"{group.environment}/{info.agent}" if several else group.environment
            if several:
                values[f"{of}/reward"].append(info.reward)
            for name, value in info.metrics.items():
                values[f"{of}/{name}"].append(value)
    return {name: float(np.mean(items)) for name, items in values.items()}
