"""Joint checkpoints: `checkpoints/step_000010/{trainer/,orchestrator.bin,COMMITTED}`.

A checkpoint exists only once COMMITTED does; it is written last, by the trainer's rank 0, and names every part.
`checkpoints/NEWEST` names the newest one, so that a node that does not see it yet knows that it has to wait.

A committed checkpoint is renamed to `*.damaged-<attempt>` only if a second look, after caches of this node have run
out, finds content that differs from the record. The reason is beside it, in `*.damaged-<attempt>.txt`. A part that this
node does not see is no damage: it raises `NotVisibleError`, and another attempt may see it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from primeslurm.base import durable, files
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.stored import manifest
from primeslurm.wire.stored.digests import XXH3
from primeslurm.wire.stored.manifest import FileRecord

COMMITTED = "COMMITTED"
NEWEST = "NEWEST"
SHARD = ".distcp"
"""How files with tensors end."""
log = logging.getLogger(__name__)
_NAME = re.compile(r"^step_(\d{6,})$")


class NotVisibleError(OSError):
    """This node does not see what has been committed. The message names it."""

    def __init__(self, path: Path, what: str) -> None:
        waited = f"not visible from this node within {files.CACHE_S:.0f} s, and nothing proves damage"
        super().__init__(errno.ESTALE, f"{what}: {waited}; nothing was renamed", str(path))


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
    others = [path for path in files.files_below(directory) if path not in known and path.name != COMMITTED]
    parts = sorted([*described, *manifest.describe(directory, others)], key=lambda record: record.name)
    value = Commit(step=step, attempt=attempt, parts=parts)
    manifest.write(directory / COMMITTED, value)
    durable.write(directory.parent / NEWEST, f"{step}\n")
    return value


def clear(directory: Path) -> None:
    """Make the empty directory of a checkpoint in place of what an earlier attempt left of it. Raises OSError."""
    if match := _NAME.match(directory.name):
        _forget_newest(directory.parents[1], int(match[1]))
    durable.remove(directory / COMMITTED)  # first: a half-deleted checkpoint must not look complete
    durable.make_anew(directory)


def read_commit(directory: Path) -> Commit | None:
    """Read the commit record; None if the checkpoint is not complete."""
    return manifest.read(directory / COMMITTED, Commit)


def committed(run_dir: Path) -> list[int]:
    """List the steps that have a complete checkpoint, ascending."""
    return [step for step, path in _directories(files.listing(run_dir / "checkpoints")) if read_commit(path)]


def newest(run_dir: Path) -> int | None:
    """Return the last committed step, or None. NEWEST is believed where this node does not see the directory yet."""
    named = _newest_named(run_dir)
    return max([*committed(run_dir)[-1:], *([] if named is None else [named])], default=None)


def set_asides(run_dir: Path) -> list[str]:
    """Say in words which checkpoints were set aside, and why."""
    found = []
    for path in files.listing(run_dir / "checkpoints", "*.damaged-*.txt"):
        why = files.read_text(path).splitlines()
        found.append(f"{path.with_suffix('')} was set aside: {why[0] if why else 'its reason was lost'}")
    return found


def newest_whole(run_dir: Path) -> int | None:
    """Return the last committed step whose checkpoint is not damaged, as far as `damage_at_sight` tells, or None.

    Raises:
        NotVisibleError: this node does not see all of a newer one, and nothing proves that it is damaged.
    """
    return _newest_whole(run_dir, lambda step, why: None)


def set_damaged_aside(
    run_dir: Path, attempt: int, told: Callable[[int, str, Path], None] = lambda step, why, path: None
) -> int | None:
    """Set committed checkpoints aside that are damaged; returns the step of the newest one that is not.

    Args:
        run_dir: of the run.
        attempt: that does it.
        told: called for each with its step, the reason, and where it is now.

    Raises:
        NotVisibleError: as from `newest_whole`. Nothing newer than the newest whole one is lost then.
        OSError: one cannot be renamed.
    """

    def aside(step: int, why: Sequence[str]) -> None:
        told(step, "; ".join(why), set_aside(run_dir, step, attempt, why))

    return _newest_whole(run_dir, aside)


def set_aside(run_dir: Path, step: int, attempt: int, why: Sequence[str]) -> Path:
    """Rename a checkpoint that is proven to be damaged to `*.damaged-<attempt>`: then it is nobody's newest.

    Args:
        run_dir: of the run.
        step: of the checkpoint.
        attempt: that sets it aside.
        why: the proof, in words: it is written beside the directory. There has to be one.

    Returns:
        The new path of the directory.

    Raises:
        OSError: it cannot be renamed, or the reason cannot be written.
    """
    if not why:
        raise ValueError(f"nothing proves that the checkpoint of step {step} is damaged")
    log.error("checkpoint of step %d is damaged, trying the one before: %s", step, "; ".join(why))
    directory = step_dir(run_dir, step)
    target = directory.with_name(f"{directory.name}.damaged-{attempt}")
    durable.write(target.with_name(f"{target.name}.txt"), "".join(f"{line}\n" for line in why))
    _forget_newest(run_dir, step)
    durable.rename(directory, target)
    return target


def _newest_whole(run_dir: Path, damaged: Callable[[int, Sequence[str]], None]) -> int | None:
    """Look at checkpoints from the newest on, and hand on those that are proven to be damaged."""
    passed: set[int] = set()
    while True:
        steps = [step for step in _all_committed(run_dir) if step not in passed]
        if not steps:
            return None
        why = _proven_damage(step_dir(run_dir, steps[-1]))
        if why == []:
            return steps[-1]
        if why is not None:
            damaged(steps[-1], why)
            passed.add(steps[-1])


def _all_committed(run_dir: Path) -> list[int]:
    """List all steps with a COMMITTED, readable or not, once the one is seen that NEWEST names."""
    root = run_dir / "checkpoints"

    def look() -> list[int] | None:
        paths, expected = set(files.settled_listing(root)), _newest_named(run_dir)
        if expected is not None:
            paths.add(step_dir(run_dir, expected))  # a listing may be older than a look at the directory itself
        steps = [step for step, path in _directories(sorted(paths)) if files.exists(path / COMMITTED)]
        return steps if expected is None or expected in steps else None

    steps = files.until_seen(look, root)
    if steps is None and (expected := _newest_named(run_dir)) is not None:
        directory = step_dir(run_dir, expected)
        raise NotVisibleError(
            directory / COMMITTED,
            f"step {expected} is committed, as {root / NEWEST} says. Was it removed on purpose? "
            f"Then remove that file, too. Otherwise it is",
        )
    return steps or []


def _proven_damage(directory: Path) -> list[str] | None:
    """Return what is wrong with a committed checkpoint at sight, by a second look at what the first one found.

    Returns:
        None if it is gone: another process has set it aside meanwhile.

    Raises:
        NotVisibleError: a part is not there, and no other one is damaged.
    """
    wrong, unseen = _look(directory)
    if not wrong and not unseen:
        return []

    def look() -> bool | None:
        nonlocal wrong, unseen
        wrong, unseen = _look(directory)
        return True if not wrong and not unseen else None

    names = [COMMITTED, *unseen, *_wrong_parts(directory)]
    paths = {path for name in names for path in (directory / name, (directory / name).parent)}
    if files.until_seen(look, directory.parent, *sorted(paths)):
        return []
    if not files.exists(directory):
        return None
    if not wrong:
        raise NotVisibleError(directory, f"{len(unseen)} parts, as {', '.join(unseen[:3])}")
    return wrong


def _look(directory: Path) -> tuple[list[str], list[str]]:
    """Return what differs from its record, in words, and names of parts that are not seen."""
    try:
        record = manifest.parsed(directory / COMMITTED, Commit)
    except DamagedError as error:
        return [f"{directory / COMMITTED}: is no manifest: {error}"], []
    if record is None:
        return [], [COMMITTED]
    unseen = manifest.absent(directory, record.parts)
    seen = [part for part in record.parts if part.name not in unseen]
    small = [part for part in seen if not is_shard(part)]
    try:
        return manifest.misplaced(directory, seen) or manifest.differing(directory, small), unseen
    except FileNotFoundError:
        return [], unseen or [COMMITTED]


def _wrong_parts(directory: Path) -> list[str]:
    """Name the parts that are worth another look: those of another size, and all small ones."""
    record = read_commit(directory)
    parts = record.parts if record else []
    return [part.name for part in parts if not is_shard(part) or manifest.misplaced(directory, [part])]


def _directories(paths: Sequence[Path]) -> list[tuple[int, Path]]:
    return sorted((int(match[1]), path) for path in paths if (match := _NAME.match(path.name)))


def _newest_named(run_dir: Path) -> int | None:
    """Return the step that NEWEST names; None in a run of an older release, and before the first commit."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        return int(files.read_bytes(run_dir / "checkpoints" / NEWEST))
    return None


def _forget_newest(run_dir: Path, step: int) -> None:
    """Have NEWEST name an older checkpoint than the one of `step`, which is about to go."""
    if _newest_named(run_dir) != step:
        return
    older = [each for each in committed(run_dir) if each < step]
    if older:
        durable.write(run_dir / "checkpoints" / NEWEST, f"{older[-1]}\n")
    else:
        durable.remove(run_dir / "checkpoints" / NEWEST)


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


def proven_differences(directory: Path, parts: Sequence[FileRecord]) -> list[str]:
    """Read parts of a checkpoint, those that differ a second time.

    Returns:
        What is wrong, in words.

    Raises:
        NotVisibleError: a part is not there, and no other one differs.
    """

    def look() -> list[str] | None:
        return None if manifest.differing(directory, parts) else []

    paths = {path for part in parts for path in (directory / part.name, (directory / part.name).parent)}
    if files.until_seen(look, *sorted(paths)) is not None:
        return []
    unseen = manifest.absent(directory, parts)
    found = manifest.differing(directory, [part for part in parts if part.name not in unseen])
    if unseen and not found:
        raise NotVisibleError(directory, f"{len(unseen)} parts, as {', '.join(unseen[:3])}")
    return found


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
    kept = {*steps[-keep:], *needed}
    doomed = [
        (step, path)
        for step, path in _directories(files.listing(run_dir / "checkpoints"))
        if step not in kept and step < steps[-1]
    ]
    # A second look at what seems to be a leftover: this node may not have seen its COMMITTED, or could not read it.
    if any(step not in steps and files.exists(path / COMMITTED) for step, path in doomed):
        log.warning("no checkpoint is deleted now: COMMITTED of one that seemed to be a leftover is there")
        return []
    for _, path in doomed:
        durable.remove(path / COMMITTED)
        files.remove_tree(path, ignore_errors=True)
    return [step for step, _ in doomed]
