"""Finds engines that give damaged answers: a pure state machine.

Workers repeat a request whose answer is damaged, so no rollout fails at once. An engine is bad if at least half of its
recent answers are damaged, for requests of several tasks, because a single prompt may break any engine.

A bad engine is restarted. If all engines were restarted, and one is bad again before any has given a usable answer, the
cause is not an engine: all have the same policy and the same configuration. An engine without answers is not bad,
because its requests may take an hour.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from primeslurm.orchestrator.rollouts.job_protocol import AnswerCounts

WINDOW_S = 120.0  # answers count for this long
FEW = 8  # damaged answers that suffice, if they belong to SEVERAL_TASKS tasks
SEVERAL_TASKS = 3
# Damaged answers that suffice without a usable one, for any number of tasks, if other engines give usable ones.
MANY = 24
BAD_FRACTION = 0.5
SETTLE_S = 10.0  # reports that arrive this soon after a verdict are about the engine before its restart


@dataclass(frozen=True)
class BadEngine:
    """An engine that gives damaged answers."""

    engine: str
    damaged: int  # damaged answers, of `answers`
    answers: int
    error: str  # what was wrong with the last damaged answer
    again: bool  # all engines were restarted for this, and none has given a usable answer since

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
    """Counts of recent answers by engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._restarted: set[str] = set()  # engines that were found to be bad since any engine gave a usable answer
        self._judged_at: dict[str, float] = {}

    def add(self, reports: Mapping[str, AnswerCounts], engines: Collection[str]) -> list[BadEngine]:
        """Add a worker's report. Return the engines that are bad now. Their answers so far are not counted."""
        now = self._clock()
        reports = {name: each for name, each in reports.items() if now - self._judged_at.get(name, -inf) > SETTLE_S}
        for name, answers in reports.items():
            self._engines.setdefault(name, _Engine()).recent.append((now, answers))
            if answers.good:
                self._restarted.clear()
        for engine in self._engines.values():
            engine.prune(now)
        bad = [name for name, answers in reports.items() if answers.damaged and self._is_bad(name)]
        verdicts = [self._verdict(name, engines) for name in bad]
        self._restarted.update(bad)
        for name in bad:
            self._judged_at[name] = now
            del self._engines[name]
        return verdicts

    def _is_bad(self, name: str) -> bool:
        engine = self._engines[name]
        good, damaged = engine.good, engine.damaged
        if damaged < FEW or damaged < BAD_FRACTION * (good + damaged):
            return False
        if len(engine.tasks) >= SEVERAL_TASKS:
            return True
        others = any(other.good for each, other in self._engines.items() if each != name)
        return damaged >= MANY and not good and others

    def _verdict(self, name: str, engines: Collection[str]) -> BadEngine:
        engine = self._engines[name]
        error = next(answers.error for _, answers in reversed(engine.recent) if answers.damaged)
        # Only engines of the same role are compared: with disaggregated prefill, only decode engines answer.
        alike = {other for other in engines if _role(other) == _role(name)} | {name}
        answers = engine.good + engine.damaged
        return BadEngine(name, engine.damaged, answers, error, again=alike <= self._restarted)


def _role(engine: str) -> str:
    return engine.partition("-r")[0]
