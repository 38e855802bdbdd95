"""Whether an environment fails for good: the same failure again and again, and no rollout that got through. Pure.

That some rollouts of a task fail at once while others run for hours says nothing. An environment is given up when the
failures are alike, of several tasks, and nothing that was started before or with them is still under way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from primeslurm.base.errors import signature
from primeslurm.orchestrator.rollouts.job_protocol import Cause, Job, RolloutError
from primeslurm.records.state import FailedRollouts

FEW_FAILURES = 8
FEW_TASKS = 3
"""So many failures, of so many tasks, are enough where everything fails."""
FEW_KILLERS = 8
"""So many tasks that kill their workers are enough where no rollout has ever got through."""
MANY_KILLERS = 24
"""So many in a row, while no rollout gets through, are enough where some have."""
MANY_UNFIT = 1000
"""Tasks in a row whose own prompts are too long, while no rollout ends."""
MOST_KINDS = 100
"""Kinds of failures of an environment that are counted apart."""
FEW_STARTS = 2
"""So often workers of an environment may fail to start, each of them at least once, while none serves it."""
SLACK = 2.0
SLACK_S = 5.0
"""A rollout that has lived longer than this times the longest-lived failure, plus this, may yet succeed."""
PRUNED_FROM = 1024
"""With so many rollouts under way, those that were cancelled or lost are looked for; then with twice what stays."""
_LONGEST = 500
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout)\b(: |$)")


@dataclass(frozen=True)
class Hopeless:
    """An environment of which no rollout gets through."""

    environment: str
    error: str
    """Type and message of the last failure."""
    failures: int
    may_pass: bool = False
    """Whether another attempt may go better: the environment has worked before."""

    def __str__(self) -> str:
        return f"environment {self.environment} fails every time ({self.failures} failures, no success): {self.error}"


@dataclass
class _Alike:
    """Failures of one kind."""

    failures: int = 0
    tasks: set[str] = field(default_factory=set)
    longest_s: float = 0.0
    error: str = ""


@dataclass
class _Environment:
    """What became of the rollouts of one environment."""

    first_at: float
    hopeful: bool = False
    """A rollout has got through, in this attempt or an earlier one."""
    kinds: dict[str, _Alike] = field(default_factory=dict)
    streak: int = 0
    """Failures of any kind since the last rollout that got through."""
    error: str = ""
    killers: int = 0
    """Tasks that killed their workers since the last rollout that got through."""
    unfit: int = 0
    """Tasks with too long a prompt since then."""
    total: int = 0
    given_up: int = 0
    """Tasks that were left out."""
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How often each kind of failure came, and the last one in words."""
    not_started: Counter[int] = field(default_factory=Counter)
    """By worker: how often it could not begin to serve."""


class RolloutFailures:
    """Counts failures by environment and kind.

    Args:
        many: so many failures of one kind are enough, whatever else is still under way.
        workers: how many each environment has.
        hopeful: environments that are known to work: a step was trained.
    """

    def __init__(self, many: int, workers: Mapping[str, int], hopeful: Iterable[str] = ()) -> None:
        self._many = many
        self._workers = workers
        self._hopeful = set(hopeful)
        self._environments: dict[str, _Environment] = {}
        self._running: dict[str, tuple[Job, float]] = {}
        self._most_running = PRUNED_FROM

    def started(self, job: Job, now: float) -> None:
        """Note that a rollout was given to a worker."""
        self._of(job.environment, now)
        self._running[job.id] = job, now

    def finished(self, job: str, environment: str, now: float) -> None:
        """Note that a rollout got through."""
        self._running.pop(job, None)
        known = self._of(environment, now)
        known.hopeful, known.streak, known.killers, known.unfit = True, 0, 0, 0
        known.kinds.clear()

    def failed(self, job: str, error: str, now: float, cause: Cause = "environment") -> str:
        """Note that a rollout failed.

        Args:
            job: of the rollout.
            error: with what, as its worker says it.
            now: the clock, in seconds.
            cause: whose fault that is.

        Returns:
            The label of its environment; empty if that is not known.
        """
        found, since = self._running.pop(job, (None, now))
        label = found.environment if found else ""
        known = self._of(label, since)
        known.error = headline(error)
        _count(known, known.error)
        if cause == "prompt":
            known.unfit += 1
            return label
        known.streak += 1
        if found is None or known.hopeful or cause == "engine":
            return label
        alike = known.kinds.setdefault(signature(known.error), _Alike())
        alike.failures += 1
        alike.tasks.add(found.group)
        alike.longest_s = max(alike.longest_s, now - since)
        alike.error = known.error
        return label

    def given_up(self, environment: str, now: float, *, killer: str = "") -> None:
        """Note that a task is left out.

        Args:
            environment: of the task.
            now: the clock, in seconds.
            killer: what workers died of, if that is why.
        """
        known = self._of(environment, now)
        known.given_up += 1
        if killer:
            known.killers += 1
            known.error = killer

    @property
    def report(self) -> dict[str, FailedRollouts]:
        """Return what failed, by environment, for those of which something did."""
        return {
            label: FailedRollouts(known.total, *max(known.reasons.values(), default=(0, known.error)), known.given_up)
            for label, known in self._environments.items()
            if known.reasons or known.given_up
        }

    def not_started(self, environment: str, worker: int, error: str, now: float) -> None:
        """Note that a worker could not begin to serve its environment."""
        known = self._of(environment, now)
        known.not_started[worker] += 1
        known.error = headline(error)

    def hopeless(self, now: float, runs: Callable[[str], bool], served: Iterable[str]) -> Hopeless | None:
        """Find an environment of which no rollout will get through.

        Args:
            now: the clock, in seconds.
            runs: whether a job is in flight; others were cancelled or lost.
            served: environments that have a worker.
        """
        self._prune(runs)
        live = set(served)
        for label, known in self._environments.items():
            if known.killers >= (MANY_KILLERS if known.hopeful else FEW_KILLERS):
                text = f"{known.killers} tasks in a row killed the workers that ran them: {known.error}"
                return Hopeless(label, text, known.killers, may_pass=known.hopeful)
            if known.unfit >= MANY_UNFIT:
                return Hopeless(label, known.error, known.unfit)
            if known.hopeful:
                continue
            starts, all_tried = known.not_started.total(), len(known.not_started) >= self._workers.get(label, 1)
            if starts >= FEW_STARTS and all_tried and label not in live:
                return Hopeless(label, known.error, starts)
            for alike in known.kinds.values():
                if self._is_all(label, known, alike, now, runs):
                    return Hopeless(label, alike.error, alike.failures)
        return None

    def streak(self) -> tuple[str, int, str]:
        """Return the environment with most failures since its last success, how many, and the last one."""
        worst = max(self._environments.items(), key=lambda item: item[1].streak, default=None)
        return (worst[0], worst[1].streak, worst[1].error) if worst else ("", 0, "")

    def _prune(self, runs: Callable[[str], bool]) -> None:
        """Forget jobs that are not in flight. Not at every look: there may be ten thousand that are."""
        if len(self._running) > self._most_running:
            self._running = {name: running for name, running in self._running.items() if runs(name)}
            self._most_running = max(PRUNED_FROM, 2 * len(self._running))

    def _is_all(self, label: str, known: _Environment, alike: _Alike, now: float, runs: Callable[[str], bool]) -> bool:
        if alike.failures < FEW_FAILURES or len(alike.tasks) < FEW_TASKS:
            return False
        if alike.failures >= self._many:
            return True
        enough_s = SLACK * alike.longest_s + SLACK_S
        if now - known.first_at <= enough_s:
            return False
        mine = (since for job, since in self._running.values() if job.environment == label and runs(job.id))
        return all(now - since <= enough_s for since in mine)

    def _of(self, environment: str, now: float) -> _Environment:
        known = self._environments.get(environment)
        if known is None:
            known = self._environments[environment] = _Environment(now, environment in self._hopeful)
        return known


def _count(known: _Environment, error: str) -> None:
    known.total += 1
    kind = signature(error)
    if kind not in known.reasons and len(known.reasons) >= MOST_KINDS:
        known.reasons.pop(min(known.reasons, key=lambda each: known.reasons[each][0]))
    known.reasons[kind] = known.reasons.get(kind, (0, ""))[0] + 1, error


def headline(error: str) -> str:
    """Tell an error in one line: what failed, and the last line of a traceback in place of its head."""
    text = error.removeprefix(f"{RolloutError.__name__}: ").strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if len(lines) == 1:
        return lines[0][:_LONGEST]
    first, mark, _ = lines[0].partition("Traceback (most recent call last)")
    traced = bool(mark) or any(line.startswith('File "') for line in lines)
    if traced and not mark:  # its head was cut off
        first = ": ".join(lines[0].split(": ")[:2])
    last = next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1]) if traced else lines[-1]
    return f"{first.strip().removesuffix(':')[:_LONGEST]}: {last[:_LONGEST]}"
