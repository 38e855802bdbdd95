"""Reads finished rollouts that no checkpoint covers yet: the groups in `rollouts/*.group`.

Routed experts are nearly all of a group's file, so they are skipped.
"""

from __future__ import annotations

import math
import os
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from primeslurm.base import files
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.groups import PREFIX_BYTES, GroupHead, decode_head, head_size
from primeslurm.records.rollout_files import DamagedFileError, StoredRollout
from primeslurm.records.rollouts import RolloutSummary, RolloutTranscript
from primeslurm.wire.batches.frames import ArraysHeader
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.decoding import DamagedError, decode_msgpack

PATTERN = "*.group"
PROGRESS = Path("rollouts", "progress.bin")


class _Progress(msgspec.Struct, frozen=True):
    """The fields of the orchestrator's progress that tell which batch has a group."""

    attempt: int = 0
    batches: dict[int, list[str]] = {}


class SpooledFile(NamedTuple):
    """One group's file. It is read again for each rollout, because it may be gone at any time."""

    path: Path
    step: int | None  # None: in no batch
    attempt: int
    summaries: list[RolloutSummary]

    def read(self, id: str) -> RolloutTranscript:
        """Read one rollout. Raise DamagedFileError, or OSError."""
        for summary, rollout in _stored(self.path, self.step, self.attempt):
            if summary.id == id:
                return rollout.shown(summary, {})
        raise DamagedFileError("the group was sampled again meanwhile")


class SpoolReader:
    """The groups on disk of a run. It remembers files by name, time and step."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: dict[tuple[str, int, int | None], list[RolloutSummary]] = {}

    def files(self, problems: dict[str, str]) -> list[SpooledFile]:
        """Return all groups, oldest first. Adds files that cannot be read to `problems`."""
        progress = _progress(self._run_dir)
        step_of = {name.replace("/", "_"): step for step, names in progress.batches.items() for name in names}
        seen, self._seen, spooled = self._seen, {}, []
        for path in files.listing(self._run_dir / "rollouts", PATTERN):
            step = step_of.get(path.name.removesuffix(".group"))
            try:
                if (about := files.status(path)) is None:  # deleted, because a checkpoint covers it
                    continue
                key = (path.name, about.st_mtime_ns, step)
                summaries = seen.get(key) or [summary for summary, _ in _stored(path, step, progress.attempt)]
            except FileNotFoundError:
                continue
            except (DamagedFileError, OSError) as error:
                problems[path.name] = f"{path.name}: {error}"
                continue
            self._seen[key] = summaries
            spooled.append(SpooledFile(path, step, progress.attempt, summaries))
        return sorted(spooled, key=lambda file: (math.inf if file.step is None else file.step, file.summaries[0].time))


def _progress(run_dir: Path) -> _Progress:
    try:
        return decode_msgpack(files.read_bytes(run_dir / PROGRESS), _Progress)
    except (OSError, DamagedError):
        return _Progress()


def _stored(path: Path, step: int | None, attempt: int) -> list[tuple[RolloutSummary, StoredRollout]]:
    """Read all rollouts of a group. Raise DamagedFileError, or OSError."""
    try:
        head, sequences, written_at = files.reading(path, _read)
        facts: dict[str, Any] = {
            "state": "waiting" if step is None else "trained",
            "step": step,
            "attempt": attempt,
            "example": head.info.example,
            "task": head.info.task,
            "time": written_at,
        }
        ends = accumulate(head.info.branches)
        rollouts = [sequences[end - count : end] for end, count in zip(ends, head.info.branches, strict=True)]
        return [transcripts.stored(rollout, facts) for rollout in rollouts]
    except DamagedError as error:
        raise DamagedFileError(str(error)) from error


def _read(file: BinaryIO) -> tuple[GroupHead, list[Rollout], float]:
    """Read the head of a group, its sequences without routed experts, and the time at which it was written."""
    about = os.fstat(file.fileno())
    size = about.st_size
    length = head_size(_exactly(file, PREFIX_BYTES, size))
    head = decode_head(_exactly(file, length, size))
    sequences = []
    for _ in range(_list_length(file, size)):
        count = _list_length(file, size)
        sequences.append(_sequence(file, count, size))
    branches = head.info.branches
    if not branches or not all(branches) or len(sequences) != sum(branches):
        raise DamagedError("its sequences do not match its head")
    return head, sequences, about.st_mtime


def _sequence(file: BinaryIO, count: int, size: int) -> Rollout:
    header = _bytes(file, size)
    parsed = decode_msgpack(header, ArraysHeader)
    if len(parsed.arrays) != count - 1:
        raise DamagedError("a sequence with another number of arrays than its header has")
    specs, frames = [], []
    for spec in parsed.arrays:
        if spec.name == "routed_experts":
            file.seek(_bytes_length(file, size), os.SEEK_CUR)
            continue
        specs.append(spec)
        frames.append(_bytes(file, size))
    shorter = msgspec.msgpack.encode(ArraysHeader(parsed.meta, tuple(specs)))
    return Rollout.decode([shorter, *frames])


def _list_length(file: BinaryIO, size: int) -> int:
    first = _exactly(file, 1, size)[0]
    if first >> 4 == 0x9:
        return first & 0x0F
    if first == 0xDD:
        return int.from_bytes(_exactly(file, 4, size), "big")
    raise DamagedError("it does not have the format of a group's file")


def _bytes_length(file: BinaryIO, size: int) -> int:
    if _exactly(file, 1, size) != b"\xc6":
        raise DamagedError("it does not have the format of a group's file")
    return int.from_bytes(_exactly(file, 4, size), "big")


def _bytes(file: BinaryIO, size: int) -> bytes:
    return _exactly(file, _bytes_length(file, size), size)


def _exactly(file: BinaryIO, count: int, size: int) -> bytes:
    if count > size:
        raise DamagedError(f"{size} bytes, but one part alone has {count}")
    chunks = []
    while count and (chunk := file.read(count)):
        chunks.append(chunk)
        count -= len(chunk)
    if count:
        raise DamagedError("it is shorter than its head says")
    return b"".join(chunks)
