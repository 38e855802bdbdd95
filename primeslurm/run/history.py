"""Readers of the files that a run's processes append to: metrics.jsonl and events/*.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from primeslurm.base import files
from primeslurm.records import metrics
from primeslurm.records.events import decode, in_order
from primeslurm.records.events.training import CheckpointLoaded, StepTrained
from primeslurm.records.metrics import Row
from primeslurm.records.reading import TAIL_BYTES, last_lines, whole_lines
from primeslurm.records.record import Event
from primeslurm.records.state import OrchestratorState, TrainerState
from primeslurm.run.directory import Attempt, RunDirectory

# Event files read for recent events, besides those of the head, the orchestrator and the trainer.
NOTABLE_FILES = 24


def rows(run_dir: Path) -> list[Row]:
    """Return the rows of metrics.jsonl, one per step, in order. SFT rows use the metric names of RL."""
    return metrics.rows(run_dir / metrics.FILE)


def events(run: RunDirectory) -> list[Event]:
    """Return the events of all attempts, in order of time."""
    return in_order(event for attempt in run.attempts() for event in attempt_events(attempt))


def attempt_events(attempt: Attempt) -> list[Event]:
    """Return the events of all processes of one attempt, in order of time."""
    paths = files.listing(attempt.path / "events", "*.jsonl")
    return in_order(_known(line for path in paths for line in whole_lines(path)))


def recent_events(attempt: Attempt) -> list[Event]:
    """Return the newest events of an attempt, in order of time."""
    # A large run has one file per node. Agents write only if something happens, so the newest files suffice.
    directory = attempt.path / "events"
    always = ("head.jsonl", "orchestrator.jsonl", "trainer-rank-0.jsonl")
    others = [(stat.st_mtime, path.name) for path in files.listing(directory) if (stat := files.status(path))]
    others = [(at, name) for at, name in others if name not in always]
    names = [*always, *(name for _, name in sorted(others)[-NOTABLE_FILES:])]
    return in_order(_known(line for name in names for line in last_lines(directory / name, TAIL_BYTES // 8)))


def first_event(attempt: Attempt, writer: str) -> Event | None:
    try:
        return decode(files.reading(attempt.path / "events" / f"{writer}.jsonl", lambda handle: handle.readline()))
    except OSError:
        return None


def progress_of(attempt: Attempt, task: str) -> OrchestratorState | TrainerState | None:
    """Return the orchestrator's state, or the trainer's if the task has no orchestrator."""
    if task in ("rl", "eval"):
        return attempt.state("orchestrator", OrchestratorState)
    return attempt.state("trainer-rank-0", TrainerState)


def has_trained(attempt: Attempt) -> bool:
    lines = last_lines(attempt.path / "events" / "trainer-rank-0.jsonl")
    return any(isinstance(event, StepTrained) for event in _known(lines))


def last_trained(attempt: Attempt) -> int:
    """Return the last step that an attempt trained, or the one that it resumed from; 0 if there is neither."""
    lines = last_lines(attempt.path / "events" / "trainer-rank-0.jsonl")
    return max((event.step for event in _known(lines) if isinstance(event, CheckpointLoaded | StepTrained)), default=0)


def dropped_rollouts(attempt: Attempt) -> int:
    """Return the number of rollouts that an attempt dropped as too old."""
    state = attempt.state("orchestrator", OrchestratorState)
    return state.counts.get("rollouts_dropped_stale", 0) if state else 0


def _known(lines: Iterable[bytes]) -> Iterable[Event]:
    return (event for line in lines if (event := decode(line)) is not None)
