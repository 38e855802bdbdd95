"""Writes that survive a power cut. Only this module flushes files and directories to disk.

A file survives if both its content and the directory that names it are flushed. `files.write_atomic` flushes the
content only: after a power cut the file has the old or the new content. Use `write` or `sync_tree` if the old content
would be wrong, for example because another process has been told about the new one, or a manifest names it.

A disk may be full. Each run directory has a reserve, a file of 16 MiB. A write of a record that finds no space empties
the reserve and tries again (`files.writing`), so that heartbeats, events and progress are still written. While the
reserve is released, `write_bulk` refuses larger files, which would use up that space at once. The head fills the
reserve again once there is space. `retry_until_written` repeats an operation until the disk accepts it.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from primeslurm.base import files
from primeslurm.base.files import Content, write_atomic

log = logging.getLogger(__name__)
T = TypeVar("T")
# Enough for the heartbeats and events of a thousand nodes for a while.
RESERVE_BYTES = 16 * 2**20
# A run does not start with less free space than this.
MIN_FREE_BYTES = 2**28
# The state of a run whose reserve is released.
RESERVE_RELEASED = "the file system of the run directory is full, or was until a moment ago"
# Time between two tries to write on a full disk.
RETRY_S = 2.0
# Errors of file systems that cannot flush directories.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def write(path: Path, data: Content) -> None:
    """Replace a file as `write_atomic` does. On return it is on disk."""

    def once() -> None:
        write_atomic(path, data)
        sync(path.parent)

    files.writing(path, once)


def write_together(contents: Mapping[Path, Content]) -> None:
    """Replace files of one directory as `write` does, but flush their names once. On return all are on disk."""
    directory = next(iter(contents)).parent

    def once() -> None:
        for path, data in contents.items():
            write_atomic(path, data)
        sync(directory)

    files.writing(directory, once)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2) + "\n")


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its missing parents. On return all are on disk. `mode` applies to the directory alone."""
    if not files.is_dir(path):
        if path.parent != path:
            make_directory(path.parent)
        files.writing(path, lambda: path.mkdir(mode, exist_ok=True))
        sync(path.parent)


def make_anew(path: Path) -> None:
    files.remove_tree(path)
    make_directory(path)


def rename(source: Path, target: Path) -> None:
    """Rename within a directory. On return it is on disk, provided that the content of `source` was flushed before."""
    files.rename(source, target)
    sync(target.parent)


def remove(path: Path) -> None:
    """Remove a file if it exists. On return its absence is on disk."""
    if files.exists(path):
        files.unlink(path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory. Raises OSError if that failed."""
    try:
        lost = files.retrying(path, lambda: _sync(path))
    except PermissionError:
        if files.is_dir(path):  # a directory that this user may not list cannot be opened, so not flushed either
            return
        raise
    # Never retry the flush of a file alone: the kernel reports a lost page once, and the next flush succeeds without
    # it. Only the owner of the content can write it again.
    if lost is not None:
        raise OSError(lost.errno, f"{lost.strerror} (flush)", str(path)) from lost


def _sync(path: Path) -> OSError | None:
    """Return the error of a flush that lost content. Raise any other error, which may be retried."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        # Names are already at the server. Only file content can be lost from this machine's memory.
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
        return error
    finally:
        os.close(handle)
    return None


def sync_if_there(path: Path) -> None:
    """Flush a file if it exists. If the flush loses content, write the file again; nobody may append meanwhile."""
    if not files.exists(path):
        return
    try:
        sync(path)
    except OSError as error:
        if not files.is_transient(error):
            raise
        write(path, files.read_bytes(path))
    sync(path.parent)


def sync_tree(directory: Path, flushed: Container[Path] = ()) -> None:
    """Flush all files and directories below a directory, and the directory's own name, except files in `flushed`."""
    # Each process flushes its own files: on a shared file system no process can flush what another node has written.
    _sync_below(directory, flushed)
    sync(directory.parent)


def _sync_below(directory: Path, flushed: Container[Path]) -> None:
    for path in files.listing(directory):
        if files.is_own_directory(path):
            _sync_below(path, flushed)
        elif path not in flushed and files.is_file(path):
            sync(path)
    sync(directory)


def fill_reserve(run_dir: Path, size: int = RESERVE_BYTES) -> bool:
    """Make or fill the reserve of a run if there is space for two. Return whether it is full now."""
    path = run_dir / files.RESERVE
    try:
        if files.exists(path) and not reserve_released(run_dir):
            return True
        if (free_bytes(run_dir) or 0) < 2 * size:
            return False
        with files.keeping_reserve():
            # Random bytes: a file system that compresses or copies on write would not keep space for empty blocks.
            write_atomic(path, os.urandom(size))
    except OSError:
        return False
    return True


def reserve_released(path: Path) -> bool:
    """Whether the reserve of the run that `path` belongs to is released, and not filled again. False without one."""
    for directory in (path, *path.parents):
        try:
            status = files.status(directory / files.RESERVE)
        except OSError:
            return False
        if status is not None:
            return status.st_size == 0
    return False


def write_bulk(path: Path, action: Callable[[], object]) -> str:
    """Run `action`, which writes a large file at `path`, without using the run's reserve.

    Return why the file must be written later (the disk is full, read-only or away); empty if it is written. Other
    errors are raised.
    """
    if reserve_released(path):
        return RESERVE_RELEASED
    try:
        with files.keeping_reserve():
            action()
    except OSError as error:
        if not may_recover(error):
            raise
        return str(error)
    return ""


def retry_until_written(
    action: Callable[[], T],
    within_s: float = math.inf,
    pause_s: float = RETRY_S,
    refused: Callable[[Exception], None] | None = None,
) -> T:
    """Repeat `action`, from its beginning each time, until the disk is neither full nor read-only.

    `refused` gets the error before each pause of `pause_s`; by default it is logged. After `within_s`, the last error
    is raised, and any other error at once.
    """
    deadline = files.clock() + within_s
    while True:
        try:
            return action()
        except Exception as error:
            if not is_unwritable(error) or files.clock() > deadline:
                raise
            (refused or warn)(error)
        files.pause(pause_s)


def warn(error: Exception) -> None:
    log.warning("waiting for the file system: %s", error)


def is_unwritable(error: BaseException) -> bool:
    """Whether an error says that the disk is full or read-only, in its number or in its text."""
    numbers = (*files.FULL, errno.EROFS)
    # safetensors, DCP and errors of other processes only have the text.
    texts = "|".join(re.escape(os.strerror(number)) for number in numbers)
    return (isinstance(error, OSError) and error.errno in numbers) or bool(re.search(texts, str(error)))


def may_recover(error: OSError) -> bool:
    """Whether the file system may accept the same operation later: it is full, read-only or away."""
    return is_unwritable(error) or files.is_transient(error)


def free_bytes(directory: Path) -> int | None:
    """Return the free space of a directory's file system; None if it does not answer."""
    try:
        return files.retrying(directory, lambda: shutil.disk_usage(directory).free)
    except OSError:
        return None


def describe_shortage(directory: Path, minimum: int = MIN_FREE_BYTES) -> str:
    """Describe a lack of space; empty if there is enough, or the file system does not answer."""
    free = free_bytes(directory)
    if free is None or free >= minimum:
        return ""
    return f"{free / 2**30:.2f} GiB free in {directory}, a run needs {minimum / 2**30:.2f} GiB"
