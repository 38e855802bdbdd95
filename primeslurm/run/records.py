"""Reading what the processes of a run append to: metrics.jsonl and events/*.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from primeslurm.base import files
from primeslurm.records import metrics
from primeslurm.records.events import decode, in_order
from primeslurm.records.events.training import StepTrained
from primeslurm.records.metrics import Row
from primeslurm.records.reading import TAIL_BYTES, last_lines, whole_lines
from primeslurm.records.record import Event
from primeslurm.records.state import OrchestratorState, TrainerState
from primeslurm.run.directory import Attempt, RunDirectory

NOTABLE_FILES = 24
"""Event files looked at for what happened lately, beside those of the head, the orchestrator and the trainer."""


def rows(run_dir: Path) -> list[Row]:
    """Read the rows of metrics.jsonl, one per step, in order; those of SFT under the names of RL."""
    return metrics.rows(run_dir / metrics.FILE)


def events(run: RunDirectory) -> list[Event]:
    """Read the events of all processes of all attempts, in order of time."""
    return in_order(event for attempt in run.attempts() for event in attempt_events(attempt))


def attempt_events(attempt: Attempt) -> list[Event]:
    """Read the events of all processes of one attempt, in order of time."""
    paths = files.listing(attempt.path / "events", "*.jsonl")
    return in_order(_known(line for path in paths for line in whole_lines(path)))


def recent_events(attempt: Attempt) -> list[Event]:
    """Read the newest events, in order of time, without a look at every node's: agents write when something happens."""
    directory = attempt.path / "events"
    always = ("head.jsonl", "orchestrator.jsonl", "trainer-rank-0.jsonl")
    others = [(about.st_mtime, path.name) for path in files.listing(directory) if (about := files.status(path))]
    others = [(at, name) for at, name in others if name not in always]
    names = [*always, *(name for _, name in sorted(others)[-NOTABLE_FILES:])]
    return in_order(_known(line for name in names for line in last_lines(directory / name, TAIL_BYTES // 8)))


def first_event(attempt: Attempt, writer: str) -> Event | None:
    """Read the first event of a process, without a look at the others; None if it has written none."""
    try:
        return decode(files.reading(attempt.path / "events" / f"{writer}.jsonl", lambda handle: handle.readline()))
    except OSError:
        return None


def progress_of(attempt: Attempt, task: str) -> OrchestratorState | TrainerState | None:
    """Read the state of who knows how far an attempt is: the orchestrator, or, where there is none, the trainer."""
    if task in ("rl", "eval"):
        return attempt.state("orchestrator", OrchestratorState)
    return attempt.state("trainer-rank-0", TrainerState)


def has_trained(attempt: Attempt) -> bool:
    """Whether an attempt has trained a step."""
    lines = last_lines(attempt.path / "events" / "trainer-rank-0.jsonl")
    return any(isinstance(event, StepTrained) for event in _known(lines))


def dropped_rollouts(attempt: Attempt) -> int:
    """Rollouts that were dropped as too old in an attempt."""
    state = attempt.state("orchestrator", OrchestratorState)
    return state.counts.get("rollouts_dropped_stale", 0) if state else 0


def _known(lines: Iterable[bytes]) -> Iterable[Event]:
    return (event for line in lines if (event := decode(line)) is not None)
