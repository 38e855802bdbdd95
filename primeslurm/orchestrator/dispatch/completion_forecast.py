"""Forecasts how many rollouts of open groups will be complete when the trainer can take them. Pure, with a clock.

Complete groups wait for the trainer and get older. Groups that run for much longer do not, and engines may work on as
many of them as there are slots. The forecast tells the two apart by the durations of rollouts and of trainer steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from primeslurm.orchestrator.dispatch.group_queues import OpenGroup

# The forecast looks at every running rollout, so it is refreshed only after a second, or 1 % of a step.
REFRESH_S, REFRESH_STEP = 1.0, 0.01
# Number of recent steps whose median duration is the horizon
STEPS = 5
# Durations drift while the policy learns, so only the newest rollouts count: at least WINDOW, and LIFETIMES times the
# most that ran at once. A shorter window would drop every rollout before it ends.
WINDOW, LIFETIMES = 4096, 4
# The survival function is fitted again after this share of the window has ended
REFIT = 0.02


class Durations:
    """The distribution of durations of one environment's rollouts.

    The survival function is the product-limit estimate (Kaplan and Meier, 1958). It also counts running rollouts, which
    last longer than their present age. Without them, short rollouts, which end first, would look like all there are.
    """

    def __init__(self) -> None:
        self._started: deque[_Run] = deque()
        self._running: dict[str, _Run] = {}
        self._window = WINDOW
        self._unfitted = 0
        self._times: NDArray[np.float64] = np.zeros(0)
        self._survival: NDArray[np.float64] = np.ones(1)

    def started(self, job: str, now: float) -> None:
        run = _Run(now)
        self._started.append(run)
        self._running[job] = run
        self._window = max(self._window, LIFETIMES * len(self._running))
        if len(self._started) > self._window:
            self._started.popleft()

    def ended(self, job: str, now: float, *, finished: bool) -> None:
        """End a rollout. One that is not `finished` was cut short, and would have taken longer."""
        run = self._running.pop(job, None)
        if run is not None:
            run.seconds, run.finished = now - run.start, finished
            self._unfitted += 1

    def start(self, job: str) -> float:
        run = self._running.get(job)
        return math.inf if run is None else run.start

    def ending_within(self, ages: ArrayLike, seconds: float, now: float) -> NDArray[np.float64]:
        """Return the probability that a rollout of each age [s] ends within `seconds`; 0 above all ended durations."""
        self._fit(now)
        ages = np.asarray(ages, dtype=np.float64)
        later, present = self._survives(ages + seconds), self._survives(ages)
        return np.where(present > 0, 1 - later / np.maximum(present, 1e-12), 0.0)

    def _survives(self, ages: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._survival[np.searchsorted(self._times, ages, side="right")]

    def _fit(self, now: float) -> None:
        if self._unfitted <= REFIT * len(self._started):
            return
        self._unfitted = 0
        seconds = np.array([now - run.start if run.seconds is None else run.seconds for run in self._started])
        finished = np.array([run.finished for run in self._started])
        order = np.argsort(seconds, kind="stable")
        at_risk = np.arange(len(order), 0, -1)
        ended = finished[order]
        self._times = seconds[order][ended]
        self._survival = np.concatenate([[1.0], np.cumprod(1 - 1 / at_risk[ended])])


class _Run:
    __slots__ = ("finished", "seconds", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.seconds: float | None = None
        self.finished = False


class CompletionForecast:
    """Learns the durations of rollouts by environment, and of trainer steps."""

    def __init__(self, labels: Iterable[str], clock: Callable[[], float]) -> None:
        self._durations = {label: Durations() for label in labels}
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._step_began: float | None = None
        # Batches that the trainer has beside the one it trains
        self.early_batches = 0
        # Size of each group, times the probability that it completes within the horizon
        self._landing: dict[str, float] = {}
        self._total_landing = 0.0
        # Groups that opened since the last forecast
        self._new: list[OpenGroup] = []
        # Start times of the unfinished rollouts of a group, as long as none of them starts or ends
        self._starts: dict[str, NDArray[np.float64]] = {}
        self._refreshed_at = -REFRESH_S
        self._loss, self._loss_at = 0.0, -math.inf

    def started(self, group: OpenGroup, job: str) -> None:
        self._durations[group.environment].started(job, self._clock())
        self._starts.pop(group.id, None)

    def ended(self, group: OpenGroup, job: str, *, finished: bool) -> None:
        self._durations[group.environment].ended(job, self._clock(), finished=finished)
        self._starts.pop(group.id, None)

    def opened(self, group: OpenGroup) -> None:
        self._new.append(group)

    def closed(self, group: OpenGroup) -> None:
        self._total_landing -= self._landing.pop(group.id, 0.0)
        self._starts.pop(group.id, None)

    def batch_formed(self, early: bool = False) -> None:
        """Record that a batch was formed. `early`: the trainer still trains the one before."""
        self._loss_at = -math.inf
        if early and self._step_began is not None:
            self.early_batches = 1
        else:
            self._step_began = self._clock()

    def batch_returned(self) -> None:
        """Record that the last batch was not given to the trainer."""
        if self.early_batches:
            self.early_batches = 0
        else:
            self._step_began = None

    def step_done(self) -> None:
        if self._step_began is not None:
            now = self._clock()
            self._steps.append(now - self._step_began)
            self._step_began = now if self.early_batches else None
            self.early_batches = 0

    @property
    def horizon_s(self) -> float:
        """Return the duration of a trainer step [s]; 0 before the first one."""
        return median(self._steps) if self._steps else 0.0

    def landing(self, groups: Mapping[str, OpenGroup]) -> float:
        """Return the expected number of rollouts of open groups that complete within the horizon."""
        if not self.horizon_s:
            self._new = []
            return 0.0
        now = self._clock()
        if now - self._refreshed_at >= max(REFRESH_S, REFRESH_STEP * self.horizon_s):
            self._refreshed_at, self._landing, self._total_landing = now, {}, 0.0
            self._new = list(groups.values())
        new = [group for group in self._new if group.id in groups]
        self._new = []
        for label in {group.environment for group in new}:
            self._add_landing([group for group in new if group.environment == label], self._durations[label], now)
        return self._total_landing

    def loss_if_formed_early(self, groups: Collection[OpenGroup], *, partial: bool) -> float | None:
        """Return how many rollouts of groups at their last chance would finish before the trainer needs the batch.

        With `partial`, finished rollouts of incomplete groups count. None: the duration of a step is unknown.
        """
        if not groups:
            return 0.0
        if not self._steps:
            return None
        now = self._clock()
        if now - self._loss_at < REFRESH_S:  # every rank of the trainer asks for the batch
            return self._loss
        rest_s = 0.0 if self._step_began is None else max(0.0, self._step_began + self.horizon_s - now)
        loss = 0.0
        for group in groups:
            durations = self._durations[group.environment]
            likely = durations.ending_within(np.maximum(now - self._starts_of(group, durations), 0.0), rest_s, now)
            loss += float(likely.sum()) if partial else group.size * float(likely.prod())
        self._loss_at, self._loss = now, loss
        return loss

    def _add_landing(self, groups: list[OpenGroup], durations: Durations, now: float) -> None:
        # All rollouts of an environment in one array: there are thousands.
        starts = [self._starts_of(group, durations) for group in groups]
        likely = durations.ending_within(np.maximum(now - np.concatenate(starts), 0.0), self.horizon_s, now)
        firsts = np.cumsum([0, *map(len, starts[:-1])])
        landing = np.multiply.reduceat(likely, firsts) * [group.size for group in groups]
        self._landing.update(zip([group.id for group in groups], landing.tolist(), strict=True))
        self._total_landing += float(landing.sum())

    def _starts_of(self, group: OpenGroup, durations: Durations) -> NDArray[np.float64]:
        starts = self._starts.get(group.id)
        if starts is None:
            running = [durations.start(job) for job in group.jobs]
            starts = self._starts[group.id] = np.array(running + [math.inf] * len(group.to_dispatch))
        return starts
