"""Conditions for a list of rollouts."""

from __future__ import annotations

import math

import msgspec

from primeslurm.records.rollouts import RolloutSummary


class RolloutQuery(msgspec.Struct, frozen=True):
    """Conditions that all must hold. A default admits every rollout."""

    steps: tuple[int, int] | None = None  # first and last step
    environment: str | None = None
    group: str | None = None
    version: int | None = None  # a policy version that sampled at least one token
    min_reward: float = -math.inf
    max_reward: float = math.inf
    truncated: bool | None = None
    failed: bool | None = None
    evaluation: bool | None = None
    dropped: bool | None = None

    def admits(self, rollout: RolloutSummary) -> bool:
        return all(
            (
                self.steps is None or (rollout.step is not None and self.steps[0] <= rollout.step <= self.steps[1]),
                self.environment in (None, rollout.environment),
                self.group in (None, rollout.group),
                self.version is None or _sampled_by(rollout, self.version),
                self._admits_reward(rollout.reward),
                self.truncated in (None, rollout.truncated),
                self.failed in (None, rollout.failed),
                self.evaluation in (None, rollout.evaluation),
                self.dropped in (None, bool(rollout.dropped)),
            )
        )

    def _admits_reward(self, reward: float | None) -> bool:
        if reward is None:
            return self.min_reward == -math.inf and self.max_reward == math.inf
        return self.min_reward <= reward <= self.max_reward


def _sampled_by(rollout: RolloutSummary, version: int) -> bool:
    oldest, newest = rollout.oldest_version, rollout.newest_version
    return oldest is not None and newest is not None and oldest <= version <= newest
