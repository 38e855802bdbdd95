"""Detects an environment that fails permanently: the same failure again and again, and no success. Pure.

Some rollouts of a task may fail at once while others run for hours. So an environment is given up only if the failures
are alike and of several tasks, and no rollout is still running that was started before them or with them.
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
FEW_TASKS = 3  # this many failures, of this many tasks, suffice if everything fails
FEW_KILLERS = 8  # this many tasks that kill their workers suffice if no rollout has ever succeeded
MANY_KILLERS = 24  # this many in a row without a success suffice if rollouts have succeeded before
MANY_OVERFLOWS = 1000  # this many tasks in a row whose own prompts are too long suffice, without a success between them
MAX_KINDS = 100  # kinds of failures of an environment that are counted separately
FEW_STARTS = 2  # workers of an environment may fail to start this often, each at least once, while no worker serves it
SLACK = 2.0
SLACK_S = 5.0  # a rollout that has run longer than SLACK times the longest failure plus SLACK_S may still succeed
# Number of running rollouts from which cancelled and lost ones are removed; then twice the number that remains.
PRUNE_SIZE = 1024
_LONGEST = 500
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout)\b(: |$)")


@dataclass(frozen=True)
class Hopeless:
    """An environment without any successful rollout."""

    environment: str
    error: str  # type and message of the last failure
    failures: int
    may_pass: bool = False  # whether another attempt may succeed, because the environment has worked before

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
    """Outcomes of the rollouts of one environment."""

    first_at: float
    has_succeeded: bool = False  # whether a rollout has succeeded, in this attempt or an earlier one
    kinds: dict[str, _Alike] = field(default_factory=dict)  # failures by kind since the last success
    streak: int = 0  # number of failures since the last success
    error: str = ""
    killers: int = 0  # tasks that killed their workers since the last success
    overflows: int = 0  # tasks with too long prompts since the last success
    total: int = 0
    given_up: int = 0  # tasks that were given up
    # Number of failures and the last error text of each kind.
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    failed_starts: Counter[int] = field(default_factory=Counter)  # failed starts by number of the worker


class RolloutFailures:
    """Counts of failures by environment and kind.

    Args:
        many: Number of failures of one kind that suffices, even if other rollouts are still running.
        hopeful: Environments that are known to work, because a step was trained.
    """

    def __init__(self, many: int, workers: Mapping[str, int], hopeful: Iterable[str] = ()) -> None:
        self._many = many
        self._workers = workers
        self._hopeful = set(hopeful)
        self._environments: dict[str, _Environment] = {}
        self._running: dict[str, tuple[Job, float]] = {}
        self._prune_size = PRUNE_SIZE

    def started(self, job: Job, now: float) -> None:
        self._environment(job.environment, now)
        self._running[job.id] = job, now

    def finished(self, job: str, environment: str, now: float) -> None:
        self._running.pop(job, None)
        record = self._environment(environment, now)
        record.has_succeeded, record.streak, record.killers, record.overflows = True, 0, 0, 0
        record.kinds.clear()

    def failed(self, job: str, error: str, now: float, cause: Cause = "environment") -> str:
        """Record a failed rollout. Return the label of its environment; empty if unknown."""
        running, since = self._running.pop(job, (None, now))
        label = running.environment if running else ""
        record = self._environment(label, since)
        record.error = headline(error)
        _count(record, record.error)
        if cause == "prompt":
            record.overflows += 1
            return label
        record.streak += 1
        if running is None or record.has_succeeded or cause == "engine":
            return label
        alike = record.kinds.setdefault(signature(record.error), _Alike())
        alike.failures += 1
        alike.tasks.add(running.group)
        alike.longest_s = max(alike.longest_s, now - since)
        alike.error = record.error
        return label

    def given_up(self, environment: str, now: float, *, killer: str = "") -> None:
        """Record that a task of an environment is given up. `killer`: why its workers died, if that is the reason."""
        record = self._environment(environment, now)
        record.given_up += 1
        if killer:
            record.killers += 1
            record.error = killer

    @property
    def report(self) -> dict[str, FailedRollouts]:
        return {
            label: FailedRollouts(
                record.total, *max(record.reasons.values(), default=(0, record.error)), record.given_up
            )
            for label, record in self._environments.items()
            if record.reasons or record.given_up
        }

    def not_started(self, environment: str, worker: int, error: str, now: float) -> None:
        record = self._environment(environment, now)
        record.failed_starts[worker] += 1
        record.error = headline(error)

    def hopeless(self, now: float, runs: Callable[[str], bool], served: Iterable[str]) -> Hopeless | None:
        """Return an environment whose rollouts will all fail, or None.

        `runs`: returns whether a job is in flight. Other jobs were cancelled or lost.
        """
        # Not at every call, because ten thousand rollouts may be running.
        if len(self._running) > self._prune_size:
            self._running = {name: running for name, running in self._running.items() if runs(name)}
            self._prune_size = max(PRUNE_SIZE, 2 * len(self._running))
        live = set(served)
        for label, record in self._environments.items():
            if record.killers >= (MANY_KILLERS if record.has_succeeded else FEW_KILLERS):
                text = f"{record.killers} tasks in a row killed the workers that ran them: {record.error}"
                return Hopeless(label, text, record.killers, may_pass=record.has_succeeded)
            if record.overflows >= MANY_OVERFLOWS:
                return Hopeless(label, record.error, record.overflows)
            if record.has_succeeded:
                continue
            starts, all_tried = record.failed_starts.total(), len(record.failed_starts) >= self._workers.get(label, 1)
            if starts >= FEW_STARTS and all_tried and label not in live:
                return Hopeless(label, record.error, starts)
            for alike in record.kinds.values():
                if self._fails_always(label, record, alike, now, runs):
                    return Hopeless(label, alike.error, alike.failures)
        return None

    def streak(self) -> tuple[str, int, str]:
        """Return the environment with most failures since its last success, their number, and the last error."""
        worst = max(self._environments.items(), key=lambda item: item[1].streak, default=None)
        return (worst[0], worst[1].streak, worst[1].error) if worst else ("", 0, "")

    def _fails_always(
        self, label: str, record: _Environment, alike: _Alike, now: float, runs: Callable[[str], bool]
    ) -> bool:
        if alike.failures < FEW_FAILURES or len(alike.tasks) < FEW_TASKS:
            return False
        if alike.failures >= self._many:
            return True
        enough_s = SLACK * alike.longest_s + SLACK_S
        if now - record.first_at <= enough_s:
            return False
        starts = (since for job, since in self._running.values() if job.environment == label and runs(job.id))
        return all(now - since <= enough_s for since in starts)

    def _environment(self, label: str, now: float) -> _Environment:
        record = self._environments.get(label)
        if record is None:
            record = self._environments[label] = _Environment(now, label in self._hopeful)
        return record


def _count(record: _Environment, error: str) -> None:
    record.total += 1
    kind = signature(error)
    if kind not in record.reasons and len(record.reasons) >= MAX_KINDS:
        record.reasons.pop(min(record.reasons, key=lambda each: record.reasons[each][0]))
    record.reasons[kind] = record.reasons.get(kind, (0, ""))[0] + 1, error


def headline(error: str) -> str:
    """Return an error in one line: what failed, and the last line of a traceback in place of its first."""
    text = error.removeprefix(f"{RolloutError.__name__}: ").strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if len(lines) == 1:
        return lines[0][:_LONGEST]
    first, mark, _ = lines[0].partition("Traceback (most recent call last)")
    has_traceback = bool(mark) or any(line.startswith('File "') for line in lines)
    if has_traceback and not mark:  # the beginning of the traceback was cut off
        first = ": ".join(lines[0].split(": ")[:2])
    last = lines[-1]
    if has_traceback:
        last = next((line for line in reversed(lines) if _EXCEPTION.match(line)), last)
    return f"{first.strip().removesuffix(':')[:_LONGEST]}: {last[:_LONGEST]}"
