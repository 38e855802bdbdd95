"""How much of what runs will be done by the time the trainer can take it. Pure, but for the clock that it is given.

Groups that are done wait for the trainer and grow old. Groups that still run for a while do not: engines may work on as
many of them as there are places. What tells the two apart is how long rollouts take, beside a step of the trainer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

from primeslurm.orchestrator.dispatch.durations import Durations
from primeslurm.orchestrator.dispatch.group_queues import OpenGroup

REFRESH_S, REFRESH_STEP = 1.0, 0.01
"""What is expected is worked out anew after so long, or such a part of a step: it looks at every rollout that runs."""
STEPS_SEEN = 5


class CompletionForecast:
    """Learns how long rollouts and steps take.

    Args:
        labels: of the environments.
        clock: tells the time [s].
    """

    def __init__(self, labels: Iterable[str], clock: Callable[[], float]) -> None:
        self._durations = {label: Durations() for label in labels}
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=STEPS_SEEN)
        self._given_at: float | None = None
        self.given_ahead = 0
        """Batches that the trainer has beside the one of its step."""
        self._landing: dict[str, float] = {}
        """Rollouts of each group, times how likely it is complete within the horizon."""
        self._all_landing = 0.0
        self._unknown: list[OpenGroup] = []
        """Groups that were opened since something was expected of all."""
        self._starts: dict[str, NDArray[np.float64]] = {}
        """Of the rollouts of a group that are not done; as long as none of them begins or ends."""
        self._refreshed_at = -REFRESH_S
        self._lost = 0.0
        """By cutting the next batch ahead of its time, and when that was worked out."""
        self._lost_at = -math.inf

    def started(self, group: OpenGroup, job: str) -> None:
        """Note the start of a rollout."""
        self._durations[group.environment].started(job, self._clock())
        self._starts.pop(group.id, None)

    def ended(self, group: OpenGroup, job: str, *, whole: bool) -> None:
        """Note the end of a rollout. Not `whole`: it was cut short."""
        self._durations[group.environment].ended(job, self._clock(), whole=whole)
        self._starts.pop(group.id, None)

    def batch_given(self, ahead: bool = False) -> None:
        """Note that the trainer has a batch. `ahead`: beside the one that it trains."""
        self._lost_at = -math.inf
        if ahead and self._given_at is not None:
            self.given_ahead = 1
        else:
            self._given_at = self._clock()

    def batch_taken_back(self) -> None:
        """Note that the trainer did not get the last batch after all."""
        if self.given_ahead:
            self.given_ahead = 0
        else:
            self._given_at = None

    def step_done(self) -> None:
        """Note that the trainer is done with a step, and goes on with the batch that it has, if it has one."""
        if self._given_at is not None:
            now = self._clock()
            self._steps.append(now - self._given_at)
            self._given_at = now if self.given_ahead else None
            self.given_ahead = 0

    @property
    def horizon_s(self) -> float:
        """Return how long the trainer takes for a step; 0 before its first one."""
        return median(self._steps) if self._steps else 0.0

    def opened(self, group: OpenGroup) -> None:
        """Note a group that opens."""
        self._unknown.append(group)

    def closed(self, group: OpenGroup) -> None:
        """Note that a group is not open any more."""
        self._all_landing -= self._landing.pop(group.id, 0.0)
        self._starts.pop(group.id, None)

    def landing(self, groups: Mapping[str, OpenGroup]) -> float:
        """Expect how many rollouts of open groups will be in complete ones within the horizon.

        Args:
            groups: that are open, by id; of each it was told when it opened.
        """
        if not self.horizon_s:  # within no time nothing ends; of all groups it is asked anew after the first step
            self._unknown = []
            return 0.0
        now = self._clock()
        if now - self._refreshed_at >= max(REFRESH_S, REFRESH_STEP * self.horizon_s):
            self._refreshed_at, self._landing, self._all_landing = now, {}, 0.0
            self._unknown = list(groups.values())
        unknown = [group for group in self._unknown if group.id in groups]
        self._unknown = []
        for label in {group.environment for group in unknown}:
            self._expect([group for group in unknown if group.environment == label], self._durations[label], now)
        return self._all_landing

    def lost_by_cutting(self, groups: Collection[OpenGroup], *, members: bool) -> float | None:
        """Expect how many rollouts are lost if the next batch is cut now, and not when the trainer needs it.

        Args:
            groups: that may be in no later batch.
            members: they are trained with the rollouts that are done; else they count only if all are.

        Returns:
            Of those that will be done by then; None if it is not known how long the trainer takes.
        """
        if not groups:
            return 0.0
        if not self._steps:
            return None
        now = self._clock()
        if now - self._lost_at < REFRESH_S:  # each of the trainer's ranks asks
            return self._lost
        rest_s = 0.0 if self._given_at is None else max(0.0, self._given_at + self.horizon_s - now)
        lost = 0.0
        for group in groups:
            durations = self._durations[group.environment]
            likely = durations.ending_within(np.maximum(now - self._starts_of(group, durations), 0.0), rest_s, now)
            lost += float(likely.sum()) if members else group.size * float(likely.prod())
        self._lost_at, self._lost = now, lost
        return lost

    def _expect(self, groups: list[OpenGroup], durations: Durations, now: float) -> None:
        """Work out how likely each of an environment's groups is complete: when all its rollouts are."""
        starts = [self._starts_of(group, durations) for group in groups]
        likely = durations.ending_within(np.maximum(now - np.concatenate(starts), 0.0), self.horizon_s, now)
        firsts = np.cumsum([0, *map(len, starts[:-1])])
        landing = np.multiply.reduceat(likely, firsts) * [group.size for group in groups]
        self._landing.update(zip([group.id for group in groups], landing.tolist(), strict=True))
        self._all_landing += float(landing.sum())

    def _starts_of(self, group: OpenGroup, durations: Durations) -> NDArray[np.float64]:
        found = self._starts.get(group.id)
        if found is None:
            running = [durations.start(job) for job in group.jobs]
            found = self._starts[group.id] = np.array(running + [math.inf] * len(group.to_dispatch))
        return found
