"""Joint checkpoints: `checkpoints/step_000010/{trainer/,orchestrator.bin,COMMITTED}`.

A checkpoint exists only once COMMITTED does; it is written last, by the trainer's rank 0, and names every part.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from primeslurm import durable
from primeslurm.wire.stored import manifest
from primeslurm.wire.stored.digests import XXH3
from primeslurm.wire.stored.manifest import FileRecord

COMMITTED = "COMMITTED"
SHARD = ".distcp"
"""How files with tensors end."""
log = logging.getLogger(__name__)
_NAME = re.compile(r"^step_(\d{6,})$")


class Commit(msgspec.Struct, frozen=True):
    """The content of COMMITTED."""

    step: int
    attempt: int
    parts: list[FileRecord]


def step_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def commit(directory: Path, step: int, attempt: int, described: Sequence[FileRecord] = ()) -> Commit:
    """Name every file below `directory` in COMMITTED, written last: all is on disk by then, and COMMITTED on return.

    Args:
        directory: of the checkpoint.
        step: of the checkpoint.
        attempt: that makes it.
        described: records of files that their writers made, with the digests of what they wrote, and flushed; only
            the others are read and flushed here.

    Raises:
        OSError: something cannot be read or flushed, or a file that was described is not there as it was.
    """
    if absent := manifest.misplaced(directory, described):
        raise OSError("; ".join(absent))
    known = {directory / record.name for record in described}
    durable.sync_tree(directory, flushed=known)
    files = [p for p in directory.rglob("*") if p not in known and p.is_file() and p.name != COMMITTED]
    parts = sorted([*described, *manifest.describe(directory, files)], key=lambda record: record.name)
    value = Commit(step=step, attempt=attempt, parts=parts)
    manifest.write(directory / COMMITTED, value)
    return value


def read_commit(directory: Path) -> Commit | None:
    """Read the commit record; None if the checkpoint is not complete."""
    return manifest.read(directory / COMMITTED, Commit)


def committed(run_dir: Path) -> list[int]:
    """List the steps that have a complete checkpoint, ascending."""
    root = run_dir / "checkpoints"
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return sorted(step for step, path in found if read_commit(path) is not None)


def newest(run_dir: Path) -> int | None:
    """Return the last committed step, or None."""
    steps = committed(run_dir)
    return steps[-1] if steps else None


def newest_whole(run_dir: Path) -> int | None:
    """Return the last committed step whose checkpoint looks whole, or None. See `damage_at_sight`."""
    steps = reversed(committed(run_dir))
    return next((step for step in steps if not damage_at_sight(step_dir(run_dir, step))), None)


def set_damaged_aside(run_dir: Path, attempt: int) -> int | None:
    """Set committed checkpoints aside that are newer than the newest one that looks whole; returns that one's step.

    Raises:
        OSError: one cannot be renamed.
    """
    whole = newest_whole(run_dir)
    for step in committed(run_dir):
        if whole is None or step > whole:
            set_aside(run_dir, step, attempt, damage_at_sight(step_dir(run_dir, step)))
    return whole


def set_aside(run_dir: Path, step: int, attempt: int, why: Sequence[str]) -> None:
    """Rename a damaged checkpoint to `*.damaged-<attempt>`: then it is nobody's newest. Raises OSError."""
    log.error("checkpoint of step %d is damaged, trying the one before: %s", step, "; ".join(why))
    directory = step_dir(run_dir, step)
    durable.rename(directory, directory.with_name(f"{directory.name}.damaged-{attempt}"))


def damage(directory: Path) -> list[str]:
    """Compare a committed checkpoint with its record.

    Returns:
        What is wrong, in words; empty if every part has its recorded size and digest.
    """
    record = read_commit(directory)
    return manifest.differing(directory, record.parts) if record else [f"{directory}: not committed"]


def damage_at_sight(directory: Path) -> list[str]:
    """Compare a committed checkpoint with its record, without the terabytes that are checked while they are read.

    Returns:
        What is wrong, in words; empty if every part has its size, and all but the shards their digest.
    """
    record = read_commit(directory)
    if record is None:
        return [f"{directory}: not committed"]
    small = [part for part in record.parts if not is_shard(part)]
    return manifest.misplaced(directory, record.parts) or manifest.differing(directory, small)


def is_shard(part: FileRecord) -> bool:
    """Whether a part is a trainer rank's share of the tensors: the large ones."""
    return part.name.endswith(SHARD)


def shard_sizes(run_dir: Path, step: int) -> dict[str, int]:
    """Map the names of a committed checkpoint's shards, without directories, to their bytes."""
    record = read_commit(step_dir(run_dir, step))
    return {Path(part.name).name: part.bytes for part in record.parts if is_shard(part)} if record else {}


def unchecked_shards(directory: Path) -> list[FileRecord]:
    """List the shards of a committed checkpoint that readers cannot check while they read: those of release 0.1.0."""
    record = read_commit(directory)
    parts = record.parts if record else []
    return [part for part in parts if is_shard(part) and not part.digest.startswith(XXH3)]


def prune(run_dir: Path, keep: int, needed: Collection[int] = ()) -> list[int]:
    """Delete committed checkpoints beyond the newest `keep`, and uncommitted leftovers older than the newest one.

    Args:
        run_dir: of the run.
        keep: how many stay in any case.
        needed: steps that stay besides, if they are committed.

    Returns:
        The steps whose directories were deleted, ascending.
    """
    steps = committed(run_dir)
    if not steps:
        return []
    kept = {*steps[-keep:], *(step for step in steps if step in needed)}
    doomed = []
    for path in (run_dir / "checkpoints").iterdir():
        match = _NAME.match(path.name)
        if match and int(match[1]) not in kept and int(match[1]) < steps[-1]:
            durable.remove(path / COMMITTED)
            shutil.rmtree(path, ignore_errors=True)
            doomed.append(int(match[1]))
    return sorted(doomed)
