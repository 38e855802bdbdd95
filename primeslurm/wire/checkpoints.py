"""Joint checkpoints: `checkpoints/step_000010/{trainer/,orchestrator.bin,COMMITTED}`.

A checkpoint exists only once COMMITTED does; it is written last, by the trainer's rank 0, and names every part.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from primeslurm import durable
from primeslurm.wire import manifest
from primeslurm.wire.manifest import FileRecord

COMMITTED = "COMMITTED"
_NAME = re.compile(r"^step_(\d{6,})$")


class Commit(msgspec.Struct, frozen=True):
    """The content of COMMITTED."""

    step: int
    attempt: int
    parts: list[FileRecord]


def step_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def commit(directory: Path, step: int, attempt: int) -> Commit:
    """Name every file below `directory` in COMMITTED, written last: all is on disk by then, and COMMITTED on return.

    Files that another node wrote must have been flushed there. Raises OSError.
    """
    durable.sync_tree(directory)
    files = [p for p in directory.rglob("*") if p.is_file() and p.name != COMMITTED]
    value = Commit(step=step, attempt=attempt, parts=manifest.describe(directory, files))
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


def damage(directory: Path) -> list[str]:
    """Compare a committed checkpoint with its record.

    Returns:
        What is wrong, in words; empty if every part has its recorded size and digest.
    """
    record = read_commit(directory)
    return manifest.differing(directory, record.parts) if record else [f"{directory}: not committed"]


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
