"""Which engine gives damaged answers: a pure state machine.

Workers repeat a request whose answer is damaged, so no rollout fails at once. An engine is bad if at least half of its
recent answers are damaged, to requests of several tasks: a prompt that breaks engines is no engine's fault.

A bad engine is restarted. If all engines were, and one is bad again before any has given a usable answer, engines
are not to blame: all have the same policy, and are configured alike. An engine that has not answered at all is not bad:
its requests may take an hour.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from primeslurm.orchestrator.rollouts.job_protocol import AnswerCounts

WINDOW_S = 120.0
"""AnswerCounts count for this long."""
FEW = 8
"""Damaged answers that are enough, if they are to `SEVERAL_TASKS` tasks."""
SEVERAL_TASKS = 3
MANY = 24
"""Damaged answers that are enough without a usable one, whatever they are to, if other engines give usable ones."""
BAD_SHARE = 0.5
SETTLE_S = 10.0
"""Reports that come this soon after a verdict are about the engine before its restart."""


@dataclass(frozen=True)
class BadEngine:
    """An engine that gives damaged answers."""

    engine: str
    damaged: int
    answers: int
    """Of which so many were damaged."""
    error: str
    """What was wrong with the last one."""
    again: bool
    """All engines were restarted for this, and none has given a usable answer since."""

    def __str__(self) -> str:
        return f"{self.damaged} of its last {self.answers} answers were damaged; the last: {self.error}"


@dataclass
class _Engine:
    recent: deque[tuple[float, AnswerCounts]] = field(default_factory=deque)

    def prune(self, now: float) -> None:
        while self.recent and now - self.recent[0][0] > WINDOW_S:
            self.recent.popleft()

    @property
    def good(self) -> int:
        return sum(answers.good for _, answers in self.recent)

    @property
    def damaged(self) -> int:
        return sum(answers.damaged for _, answers in self.recent)

    @property
    def tasks(self) -> set[str]:
        return {task for _, answers in self.recent for task in answers.tasks}


class DamagedAnswers:
    """See the module docstring.

    Args:
        clock: tells the time [s].
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._restarted: set[str] = set()
        """Engines that turned out to be bad since an engine gave a usable answer."""
        self._judged_at: dict[str, float] = {}

    def add(self, reports: Mapping[str, AnswerCounts], engines: Collection[str]) -> list[BadEngine]:
        """Take in what a worker reports of engines' answers.

        Args:
            reports: by name of the engine.
            engines: names of all engines of the run.

        Returns:
            The engines that are bad by now. Their answers so far count no more.
        """
        now = self._clock()
        reports = {name: each for name, each in reports.items() if now - self._judged_at.get(name, -inf) > SETTLE_S}
        for name, answers in reports.items():
            self._engines.setdefault(name, _Engine()).recent.append((now, answers))
            if answers.good:
                self._restarted.clear()
        for engine in self._engines.values():
            engine.prune(now)
        bad = [name for name, answers in reports.items() if answers.damaged and self._is_bad(name)]
        found = [self._verdict(name, engines) for name in bad]
        self._restarted.update(bad)
        for name in bad:
            self._judged_at[name] = now
            del self._engines[name]
        return found

    def _is_bad(self, name: str) -> bool:
        engine = self._engines[name]
        good, damaged = engine.good, engine.damaged
        if damaged < FEW or damaged < BAD_SHARE * (good + damaged):
            return False
        if len(engine.tasks) >= SEVERAL_TASKS:
            return True
        others = any(other.good for each, other in self._engines.items() if each != name)
        return damaged >= MANY and not good and others

    def _verdict(self, name: str, engines: Collection[str]) -> BadEngine:
        engine = self._engines[name]
        error = next(answers.error for _, answers in reversed(engine.recent) if answers.damaged)
        answers = engine.good + engine.damaged
        alike = {other for other in engines if _role(other) == _role(name)} | {name}
        return BadEngine(name, engine.damaged, answers, error, again=alike <= self._restarted)


def _role(engine: str) -> str:
    """Return the role in an engine's name. Only decode engines answer where prefill is apart."""
    return engine.partition("-r")[0]
