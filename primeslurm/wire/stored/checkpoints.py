"""Joint checkpoints: `checkpoints/step_000010/{trainer/,orchestrator.bin,COMMITTED}`.

A checkpoint is valid once COMMITTED exists. The trainer's rank 0 writes that file last, with a record of every part.
`checkpoints/NEWEST` names the newest checkpoint, so a node that does not see it yet knows that it has to wait.

A committed checkpoint is renamed to `*.damaged-<attempt>` only if its content differs from its record twice, the second
time after this node's caches have expired. `*.damaged-<attempt>.txt` holds the reason. A part that this node does not
see is no damage: it raises `NotVisibleError`, because another attempt may see it.
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
from primeslurm.wire.stored.manifest import FileRecord

COMMITTED = "COMMITTED"
NEWEST = "NEWEST"
SHARD = ".distcp"  # suffix of files that hold tensors
log = logging.getLogger(__name__)
_NAME = re.compile(r"^step_(\d{6,})$")


class NotVisibleError(OSError):
    """This node does not see a file that has been committed."""

    def __init__(self, path: Path, what: str) -> None:
        problem = f"not visible from this node within {files.CACHE_S:.0f} s, but not known to be damaged"
        super().__init__(errno.ESTALE, f"{what}: {problem}; nothing was renamed", str(path))


class Commit(msgspec.Struct, frozen=True):
    """The content of COMMITTED: the step of a checkpoint, and a record of every file in it."""

    step: int
    attempt: int
    parts: list[FileRecord]


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def commit(directory: Path, step: int, attempt: int, described: Sequence[FileRecord] = ()) -> Commit:
    """Flush every file below `directory`, then write COMMITTED with a record of each.

    Files in `described` were flushed by their writers and are not read. Raises OSError if one does not match its
    record, or a file cannot be read or flushed.
    """
    if problems := manifest.missing_or_resized(directory, described):
        raise OSError("; ".join(problems))
    flushed = {directory / record.name for record in described}
    durable.sync_tree(directory, flushed=flushed)
    others = [path for path in files.files_below(directory) if path not in flushed and path.name != COMMITTED]
    parts = sorted([*described, *manifest.describe(directory, others)], key=lambda record: record.name)
    value = Commit(step=step, attempt=attempt, parts=parts)
    manifest.write(directory / COMMITTED, value)
    durable.write(directory.parent / NEWEST, f"{step}\n")
    return value


def clear(directory: Path) -> None:
    if match := _NAME.match(directory.name):
        _forget_newest(directory.parents[1], int(match[1]))
    durable.remove(directory / COMMITTED)  # first: a half-deleted checkpoint must not look complete
    durable.make_anew(directory)


def read_commit(directory: Path) -> Commit | None:
    return manifest.read(directory / COMMITTED, Commit)


def committed(run_dir: Path) -> list[int]:
    return [step for step, path in directories(files.listing(run_dir / "checkpoints")) if read_commit(path)]


def newest(run_dir: Path) -> int | None:
    """Return the newest committed step, also if this node only sees it in NEWEST yet. None if there is none."""
    named = _newest_named(run_dir)
    return max([*committed(run_dir)[-1:], *([] if named is None else [named])], default=None)


def set_asides(run_dir: Path) -> list[str]:
    """Return a sentence for each checkpoint that was set aside, with the reason."""
    sentences = []
    for path in files.listing(run_dir / "checkpoints", "*.damaged-*.txt"):
        reasons = files.read_text(path).splitlines()
        sentences.append(f"{path.with_suffix('')} was set aside: {reasons[0] if reasons else 'its reason was lost'}")
    return sentences


def newest_whole(run_dir: Path) -> int | None:
    """Return the newest committed step without damage, as `damage_at_sight` defines it. None if there is none.

    Raise NotVisibleError if this node does not see all of a newer checkpoint, which is not known to be damaged.
    """
    return _newest_whole(run_dir, lambda step, why: None)


def set_damaged_aside(
    run_dir: Path, attempt: int, on_set_aside: Callable[[int, str, Path], None] = lambda step, why, path: None
) -> int | None:
    """Set damaged checkpoints aside until the newest one is undamaged, and return its step.

    `on_set_aside` gets step, reason and new path of each. Raises NotVisibleError as `newest_whole` does, and OSError if
    a checkpoint cannot be renamed.
    """

    def aside(step: int, why: Sequence[str]) -> None:
        on_set_aside(step, "; ".join(why), set_aside(run_dir, step, attempt, why))

    return _newest_whole(run_dir, aside)


def set_aside(run_dir: Path, step: int, attempt: int, why: Sequence[str]) -> Path:
    """Rename a damaged checkpoint to `*.damaged-<attempt>` and return its new path. Raises OSError.

    `why` has at least one proof of the damage. It is written beside the directory.
    """
    if not why:
        raise ValueError(f"nothing proves that the checkpoint of step {step} is damaged")
    log.error("the checkpoint of step %d is damaged; falling back to the one before: %s", step, "; ".join(why))
    directory = step_dir(run_dir, step)
    target = directory.with_name(f"{directory.name}.damaged-{attempt}")
    durable.write(target.with_name(f"{target.name}.txt"), "".join(f"{line}\n" for line in why))
    _forget_newest(run_dir, step)
    durable.rename(directory, target)
    return target


def _newest_whole(run_dir: Path, on_damaged: Callable[[int, Sequence[str]], None]) -> int | None:
    """Check checkpoints from the newest on, and call `on_damaged` for each that is proven to be damaged."""
    passed: set[int] = set()
    while True:
        steps = [step for step in _all_committed(run_dir) if step not in passed]
        if not steps:
            return None
        problems = _proven_damage(step_dir(run_dir, steps[-1]))
        if problems == []:
            return steps[-1]
        if problems is not None:
            on_damaged(steps[-1], problems)
            passed.add(steps[-1])


def _all_committed(run_dir: Path) -> list[int]:
    """Return all steps with a COMMITTED, readable or not. Wait until the one that NEWEST names is visible."""
    root = run_dir / "checkpoints"

    def look() -> list[int] | None:
        paths, expected = set(files.settled_listing(root)), _newest_named(run_dir)
        if expected is not None:
            paths.add(step_dir(run_dir, expected))  # a cached listing may be older than the directory's own entry
        steps = [step for step, path in directories(sorted(paths)) if files.exists(path / COMMITTED)]
        return steps if expected is None or expected in steps else None

    steps = files.until_seen(look, root)
    if steps is None and (expected := _newest_named(run_dir)) is not None:
        raise NotVisibleError(
            step_dir(run_dir, expected) / COMMITTED,
            f"step {expected} is committed, as {root / NEWEST} says. If the checkpoint was removed on purpose, "
            f"remove that file, too. Otherwise it is",
        )
    return steps or []


def _proven_damage(directory: Path) -> list[str] | None:
    """Check a committed checkpoint twice if the first check found something, and return the problems of the second.

    None if another process has meanwhile set the checkpoint aside. Raises NotVisibleError if a part is not visible, and
    no other part is damaged.
    """
    wrong, unseen = _look(directory)
    if not wrong and not unseen:
        return []

    def look() -> bool | None:
        nonlocal wrong, unseen
        wrong, unseen = _look(directory)
        return True if not wrong and not unseen else None

    record = read_commit(directory)
    suspects = [
        part.name
        for part in (record.parts if record else [])
        if not is_shard(part) or manifest.missing_or_resized(directory, [part])
    ]
    paths = {directory / name for name in [COMMITTED, *unseen, *suspects]}
    paths |= {path.parent for path in paths}
    if files.until_seen(look, directory.parent, *sorted(paths)):
        return []
    if not files.exists(directory):
        return None
    if not wrong:
        raise NotVisibleError(directory, f"{len(unseen)} parts, such as {', '.join(unseen[:3])}")
    return wrong


def _look(directory: Path) -> tuple[list[str], list[str]]:
    """Compare a checkpoint with its record. Return texts of differences, and names of files this node cannot see."""
    try:
        record = manifest.parsed(directory / COMMITTED, Commit)
    except DamagedError as error:
        return [f"{directory / COMMITTED}: is no manifest: {error}"], []
    if record is None:
        return [], [COMMITTED]
    unseen = manifest.absent(directory, record.parts)
    try:
        return _differences_at_sight(directory, [part for part in record.parts if part.name not in unseen]), unseen
    except FileNotFoundError:
        return [], unseen or [COMMITTED]


def _differences_at_sight(directory: Path, parts: Sequence[FileRecord]) -> list[str]:
    """Compare the sizes of all parts and the digests of small ones. Shards are checked while they are loaded."""
    small = [part for part in parts if not is_shard(part)]
    return manifest.missing_or_resized(directory, parts) or manifest.differing(directory, small)


def directories(paths: Sequence[Path]) -> list[tuple[int, Path]]:
    """Return the step and path of each checkpoint directory among `paths`, by step."""
    return sorted((int(match[1]), path) for path in paths if (match := _NAME.match(path.name)))


def _newest_named(run_dir: Path) -> int | None:
    """Return the step that NEWEST names, or None before the first commit."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        return int(files.read_bytes(run_dir / "checkpoints" / NEWEST))
    return None


def _forget_newest(run_dir: Path, step: int) -> None:
    """If the file NEWEST names `step`, whose checkpoint will be deleted, make it name the checkpoint before."""
    if _newest_named(run_dir) != step:
        return
    older = [each for each in committed(run_dir) if each < step]
    if older:
        durable.write(run_dir / "checkpoints" / NEWEST, f"{older[-1]}\n")
    else:
        durable.remove(run_dir / "checkpoints" / NEWEST)


def damage(directory: Path) -> list[str]:
    """Read a committed checkpoint completely and return the texts of all differences from its record."""
    record = read_commit(directory)
    return manifest.differing(directory, record.parts) if record else [f"{directory}: not committed"]


def damage_at_sight(directory: Path) -> list[str]:
    """Return the texts of differences that are visible without reading shards: all sizes, digests of small parts."""
    record = read_commit(directory)
    return _differences_at_sight(directory, record.parts) if record else [f"{directory}: not committed"]


def is_shard(part: FileRecord) -> bool:
    return part.name.endswith(SHARD)


def shard_sizes(run_dir: Path, step: int) -> dict[str, int]:
    """Return the size [bytes] of each shard of a committed checkpoint, by file name without directories."""
    record = read_commit(step_dir(run_dir, step))
    return {Path(part.name).name: part.bytes for part in record.parts if is_shard(part)} if record else {}


def prune(run_dir: Path, keep: int, needed: Collection[int] = ()) -> list[int]:
    """Delete committed checkpoints beyond the newest `keep`, and uncommitted ones older than the newest.

    Returns the deleted steps, ascending.
    """
    steps = committed(run_dir)
    if not steps:
        return []
    keep_steps = {*steps[-keep:], *needed}
    obsolete = [
        (step, path)
        for step, path in directories(files.listing(run_dir / "checkpoints"))
        if step not in keep_steps and step < steps[-1]
    ]
    # A directory without COMMITTED may be a checkpoint whose COMMITTED this node has not seen or read yet.
    if any(step not in steps and files.exists(path / COMMITTED) for step, path in obsolete):
        log.warning("deleted no checkpoints: one that seemed to be uncommitted has been committed")
        return []
    for _, path in obsolete:
        durable.remove(path / COMMITTED)
        files.remove_tree(path, ignore_errors=True)
    return [step for step, _ in obsolete]
