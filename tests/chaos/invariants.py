"""Invariants of a run that has ended, whatever faults it had.

Each check returns the problems in words; an empty list if there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from primeslurm.orchestrator.pipeline.progress import CHECKPOINT_PART, RunProgress
from primeslurm.records.events.training import CheckpointCommitted, CheckpointLoaded, StepTrained
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import attempt_events, rows
from primeslurm.wire.stored import checkpoints
from tests.chaos.spool_watch import SeenGroup
from tests.support.emulation import DROPPED_AHEAD

NONE: Mapping[int, int] = MappingProxyType({})


@dataclass
class Segment:
    """The trainer's work from one start to the next."""

    attempt: int
    began: float
    """In Unix seconds."""
    loaded: int
    """Step from which it resumed."""
    trained: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)


def segments(run: RunDirectory) -> list[Segment]:
    """Return rank 0's segments in all attempts."""
    result: list[Segment] = []
    for attempt in run.attempts():
        for event in attempt_events(attempt):
            if event.process != "trainer-rank-0":
                continue
            if isinstance(event, CheckpointLoaded):
                result.append(Segment(attempt.number, event.time, event.step))
            elif result and isinstance(event, StepTrained):
                result[-1].trained.append(event.step)
            elif result and isinstance(event, CheckpointCommitted):
                result[-1].committed.append(event.step)
    return result


def committed_steps_lost(segments: Sequence[Segment], damaged: Mapping[int, int] = NONE) -> list[str]:
    """Check that every start resumes from the newest committed step.

    `damaged` maps an attempt to the step whose checkpoint was damaged after it.
    """
    problems, committed, left = [], {0}, dict(damaged)
    for segment in segments:
        committed -= {left.pop(attempt) for attempt in damaged if attempt < segment.attempt and attempt in left}
        if segment.loaded < max(committed):
            newest = f"step {max(committed)} was committed"
            problems.append(f"attempt {segment.attempt} resumed from step {segment.loaded}, but {newest}")
        committed |= {segment.loaded, *segment.committed}
    return problems


def final_steps(segments: Sequence[Segment]) -> list[int]:
    """Return the trained steps that no later start has undone, in order."""
    steps: list[int] = []
    for segment in segments:
        steps = [step for step in steps if step <= segment.loaded] + segment.trained
    return steps


def trained_once(segments: Sequence[Segment], steps: int, *, records_lost: bool) -> list[str]:
    """Check that each step that counts was trained once.

    With `records_lost` events may be missing, because the disk did not accept them.
    """
    trained = final_steps(segments)
    problems = [f"step {step} was trained {count} times" for step, count in Counter(trained).items() if count > 1]
    missing = sorted(set(range(1, steps + 1)).difference(trained))
    if missing and not records_lost:
        problems.append(f"no event says that these steps were trained: {missing}")
    return problems


def checkpoints_whole(run: RunDirectory, segments: Sequence[Segment], steps: int) -> list[str]:
    """Check that every committed step exists undamaged, including the last one."""
    there = checkpoints.committed(run.path)
    ever = {step for segment in segments for step in segment.committed} | {steps}
    problems = [f"the checkpoint of step {step} is gone" for step in sorted(ever.difference(there))]
    return problems + [text for step in there for text in checkpoints.damage(checkpoints.step_dir(run.path, step))]


def batches(run: RunDirectory) -> dict[int, list[str]]:
    """Return the groups of every trained step, from the checkpoints that were committed later."""
    groups_by_step: dict[int, list[str]] = {}
    for step in reversed(checkpoints.committed(run.path)):
        path = checkpoints.step_dir(run.path, step) / CHECKPOINT_PART
        progress = msgspec.msgpack.decode(path.read_bytes(), type=RunProgress)
        groups_by_step |= {number: groups for number, groups in progress.batches.items() if number <= step}
    return groups_by_step


def groups_once(given: dict[int, list[str]], steps: int) -> list[str]:
    """Check that every step has a batch, and that no group is in two."""
    problems = [f"no checkpoint knows the batch of step {step}" for step in range(1, steps + 1) if step not in given]
    count = Counter(name for names in given.values() for name in names)
    return problems + [f"group {name} was trained {times} times" for name, times in count.items() if times > 1]


def metrics_once(run: RunDirectory, steps: int, *, records_lost: bool) -> list[str]:
    """Check that metrics.jsonl has a row for every step, in order."""
    numbers = [int(row["step"]) for row in rows(run.path)]
    if records_lost:
        return [] if numbers == sorted(set(numbers)) else [f"rows of metrics.jsonl are out of order: {numbers}"]
    return [] if numbers == list(range(1, steps + 1)) else [f"metrics.jsonl has rows of these steps: {numbers}"]


@dataclass
class Fates:
    """What happened to the finished rollouts that were on disk."""

    trained: int = 0
    spooled: int = 0
    """Still waiting at the end of the run."""
    stale: int = 0
    """Too old for the recipe's limit."""
    undone: int = 0
    """Sampled by a policy, or trained in a step, that was undone because it was not committed."""
    lost: int = 0
    problems: list[str] = field(default_factory=list)


def fates(
    seen: Sequence[SeenGroup],
    given: dict[int, list[str]],
    segments: Sequence[Segment],
    max_off_policy_steps: int,
    damaged: Mapping[int, int] = NONE,
) -> Fates:
    """Find out what happened to every finished group.

    Args:
        seen: all groups that were ever on disk.
        segments: work of the trainer, whose starts undo policies.
        damaged: as in `committed_steps_lost`. Groups are removed when their step is committed.
    """
    trained = {name for names in given.values() for name in names}
    last = {group.id: index for index, group in enumerate(seen)}
    resumed = _resumed(segments)
    behind = _resumed([segment for segment in segments if segment.attempt - 1 in damaged])
    answer = Fates()
    for index, group in enumerate(seen):
        if group.id in trained and last[group.id] == index:
            answer.trained += group.rollouts
        elif group.gone_at_step is None:
            answer.spooled += group.rollouts
        elif any(_undoes(start, group) for start in resumed) or any(
            _restored_without(start, group) for start in behind
        ):
            answer.undone += group.rollouts
        # A policy existed when it sampled, even if the records are a step behind.
        elif group.opened < max(group.gone_at_step, group.newest) + DROPPED_AHEAD - 1 - max_off_policy_steps:
            answer.stale += group.rollouts
        else:
            answer.lost += group.rollouts
            answer.problems.append(
                f"finished group {group.id} (versions {group.opened} to {group.newest}) was gone at step "
                f"{group.gone_at_step}, and was never trained"
            )
    return answer


def _undoes(start: tuple[float, int], group: SeenGroup) -> bool:
    began, step = start
    return began >= group.seen_at and group.newest > step


def _restored_without(start: tuple[float, int], group: SeenGroup) -> bool:
    began, step = start
    return began >= group.gone_at and group.gone_at_step is not None and group.gone_at_step > step


def _resumed(segments: Iterable[Segment]) -> list[tuple[float, int]]:
    """Return start time and step of each new attempt. A trainer that restarts within an attempt undoes no policy."""
    first: dict[int, Segment] = {}
    for segment in segments:
        first.setdefault(segment.attempt, segment)
    return [(segment.began, segment.loaded) for segment in first.values()]


def leftovers(run: RunDirectory, tmp: Path, excused: Collection[str] = ()) -> list[str]:
    """Return files and sockets that the run has left on this machine.

    Args:
        run: a run whose processes have ended.
        tmp: the job's directory of temporary files.
        excused: parts of names of files that nobody could have removed.
    """
    paths = [path for path in sorted(tmp.iterdir()) if not any(part in path.name for part in excused)]
    problems = [f"{path} was left behind" for path in paths]
    problems += [f"{path} was left behind" for path in Path("/dev/shm").iterdir() if run.run_id in path.name]
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if run.run_id in line]
    return problems + [f"socket {name} was left behind" for name in sockets]
