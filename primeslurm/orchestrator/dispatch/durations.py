"""How long rollouts take, learned from those that ended and from those that still run. Pure: times are given."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

WINDOW, LIFETIMES = 4096, 4
"""So many of the newest rollouts are learned from, as durations drift while the policy learns; where more run, so many
times those that ever ran at once: a rollout is among them for as many mean durations, or nobody would see it end."""
FRESH = 0.02
"""Share of the window after which what was learned is worked out anew."""


class Durations:
    """Of one environment's rollouts: how likely one of some age is still running after a while.

    The survival function is the product-limit estimate (Kaplan and Meier, 1958): a rollout that still runs says that it
    takes longer than its age. Without it short rollouts, which end first, would be taken for all there are.
    """

    def __init__(self) -> None:
        self._started: deque[_Run] = deque()
        self._running: dict[str, _Run] = {}
        self._window = WINDOW
        self._news = 0
        self._times: NDArray[np.float64] = np.zeros(0)
        self._survival: NDArray[np.float64] = np.ones(1)

    def started(self, job: str, now: float) -> None:
        """Note the start of a rollout."""
        run = _Run(now)
        self._started.append(run)
        self._running[job] = run
        self._window = max(self._window, LIFETIMES * len(self._running))
        if len(self._started) > self._window:
            self._started.popleft()

    def ended(self, job: str, now: float, *, whole: bool) -> None:
        """Note the end of a rollout. Not `whole`: it was cut short, and would have taken longer."""
        run = self._running.pop(job, None)
        if run is not None:
            run.seconds, run.whole = now - run.start, whole
            self._news += 1

    def start(self, job: str) -> float:
        """Return when a rollout that runs began; endless for one that is not known: it has not begun."""
        run = self._running.get(job)
        return math.inf if run is None else run.start

    def ending_within(self, ages: ArrayLike, seconds: float, now: float) -> NDArray[np.float64]:
        """Estimate how likely each of some rollouts ends within the next seconds.

        Args:
            ages: of the rollouts [s]; 0 for one that has not begun.
            seconds: from now on.
            now: the time.

        Returns:
            Probabilities, in the order of the ages. 0 for what is older than all that ended, and as long as none has.
        """
        self._learn(now)
        then = np.asarray(ages, dtype=np.float64)
        later, still = self._survives(then + seconds), self._survives(then)
        return np.where(still > 0, 1 - later / np.maximum(still, 1e-12), 0.0)

    def _survives(self, ages: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._survival[np.searchsorted(self._times, ages, side="right")]

    def _learn(self, now: float) -> None:
        if self._news <= FRESH * len(self._started):
            return
        self._news = 0
        seconds = np.array([now - run.start if run.seconds is None else run.seconds for run in self._started])
        whole = np.array([run.whole for run in self._started])
        order = np.argsort(seconds, kind="stable")
        at_risk = np.arange(len(order), 0, -1)
        ended = whole[order]
        self._times = seconds[order][ended]
        self._survival = np.concatenate([[1.0], np.cumprod(1 - 1 / at_risk[ended])])


class _Run:
    __slots__ = ("seconds", "start", "whole")

    def __init__(self, start: float) -> None:
        self.start = start
        self.seconds: float | None = None
        self.whole = False
