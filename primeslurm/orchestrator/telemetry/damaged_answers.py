"""Which engine gives damaged answers: a pure state machine.

Workers repeat a request whose answer is damaged, so no rollout fails at once. An engine is bad if at least half of its
recent answers are damaged, to requests of several tasks: a prompt that breaks engines is no engine's fault.

A bad engine is restarted. If it is bad again, and no engine has given a usable answer meanwhile, the engine is not to
blame: all engines have the same policy, and are configured alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from primeslurm.orchestrator.rollouts.generate_endpoint import Answers

WINDOW_S = 120.0
"""Answers count for this long."""
FEW = 8
"""Damaged answers that are enough, if they are to `SEVERAL_TASKS` tasks."""
SEVERAL_TASKS = 3
MANY = 24
"""Damaged answers that are enough without a usable one, whatever they are to, if other engines give usable ones."""
BAD_SHARE = 0.5


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
    """It was restarted for this before, and no engine has given a usable answer since."""

    def __str__(self) -> str:
        return f"{self.damaged} of its last {self.answers} answers were damaged; the last: {self.error}"


@dataclass
class _Engine:
    recent: deque[tuple[float, Answers]] = field(default_factory=deque)

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

    def add(self, reports: Mapping[str, Answers]) -> list[BadEngine]:
        """Take in what a worker reports of engines' answers.

        Args:
            reports: by name of the engine.

        Returns:
            The engines that are bad by now. Their answers so far count no more.
        """
        now = self._clock()
        for name, answers in reports.items():
            self._engines.setdefault(name, _Engine()).recent.append((now, answers))
            if answers.good:
                self._restarted.clear()
        for engine in self._engines.values():
            engine.prune(now)
        found = [self._verdict(name) for name, answers in reports.items() if answers.damaged and self._is_bad(name)]
        for bad in found:
            self._restarted.add(bad.engine)
            del self._engines[bad.engine]
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

    def _verdict(self, name: str) -> BadEngine:
        engine = self._engines[name]
        error = next(answers.error for _, answers in reversed(engine.recent) if answers.damaged)
        answers = engine.good + engine.damaged
        return BadEngine(name, engine.damaged, answers, error, again=name in self._restarted)
