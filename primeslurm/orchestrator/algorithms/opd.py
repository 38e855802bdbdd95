"""On-policy distillation: move the policy towards a teacher's token probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from primeslurm.orchestrator.algorithms.grpo import centred
from primeslurm.orchestrator.algorithms.protocol import Algorithm, Credit, by_role, per_trace
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.batches.frames import Float32
from primeslurm.wire.batches.rollout import MIN_LOGPROB, Rollout


@dataclass(frozen=True)
class Opd(Algorithm):
    """A_it = log p_teacher(t) - log p_engine(t) + reward * (r_i - mean(r)), for sampled token t of rollout i.

    The mean of the difference over sampled tokens estimates -KL(policy || teacher). MiniLLM (arXiv 2306.08543) and GKD
    (arXiv 2306.13649), in the form of Thinking Machines Lab, On-Policy Distillation, 2025: no return over later tokens.
    """

    reward: float = 0.0  # Factor of the reward term. 0: rewards are only reported.
    needs_teacher = True

    def assign(self, groups: Sequence[RolloutGroup]) -> list[list[Credit]]:
        return [self._group(group) for group in groups]

    def _group(self, group: RolloutGroup) -> list[Credit]:
        of_rewards = per_trace(group, [self.reward * advantage for advantage in by_role(group, centred)])
        pairs = zip(group.sequences, of_rewards, strict=True)
        return [Credit(credit.advantages + _log_ratio(sequence), credit.mask) for sequence, credit in pairs]


def _log_ratio(sequence: Rollout) -> Float32:
    """Return log p_teacher - log p_engine at sampled tokens, 0 elsewhere. Shape [tokens]."""
    if sequence.ref_logprobs is None:
        raise ValueError(f"rollout {sequence.info.id} has no log-probabilities of the teacher")
    # vLLM reports a probability of 0 as -9999. A single such token would dominate the batch.
    teacher, engine = (np.maximum(one, np.float32(MIN_LOGPROB)) for one in (sequence.ref_logprobs, sequence.logprobs))
    return np.where(sequence.mask, teacher - engine, np.float32(0))
