"""What is still there after a power cut: the one place that puts files and directories on disk.

A file is on disk once it was flushed, and so was the directory that names it. `files.write_atomic` does the first:
after a power cut there is the old content or the new one. What must not be the old one (because somebody was told of
it, or because a manifest names it) is written by `write`, or flushed by `sync_tree` before it counts.

A failed flush of a file is never repeated alone: the kernel reports a lost page once, and the next flush succeeds
without it. Only whoever has the content can write it again.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Container
from pathlib import Path
from typing import Any

from primeslurm.base import files
from primeslurm.base.files import Content, write_atomic

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Of file systems that flush no directories: theirs are on disk when a call returns, or cannot be made to be."""


def write(path: Path, data: Content) -> None:
    """`write_atomic`, and on disk when this returns. Raises OSError."""

    def once() -> None:
        write_atomic(path, data)
        sync(path.parent)

    files.retrying(path, once)


def write_json(path: Path, value: Any) -> None:
    """`write` of indented JSON."""
    write(path, json.dumps(value, indent=2) + "\n")


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory with its parents, all on disk when this returns; those that are there stay as they are.

    Args:
        path: of the directory.
        mode: of this one, not of its parents.
    """
    if not files.is_dir(path):
        if path.parent != path:
            make_directory(path.parent)
        files.retrying(path, lambda: path.mkdir(mode, exist_ok=True))
        sync(path.parent)


def make_anew(path: Path) -> None:
    """Make an empty directory in place of what is there, on disk when this returns."""
    files.remove_tree(path)
    make_directory(path)


def rename(source: Path, target: Path) -> None:
    """Rename within a directory, on disk when this returns: what is below `source` has been flushed before."""
    files.rename(source, target)
    sync(target.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there, for good: what follows may rely on its absence."""
    if files.exists(path):
        files.unlink(path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush one file, or the names in one directory (of those that one may not list, nothing can be flushed).

    Raises:
        OSError: it is not on disk.
    """
    try:
        lost = files.retrying(path, lambda: _sync(path))
    except PermissionError:
        if files.is_dir(path):
            return
        raise
    if lost is not None:
        raise OSError(lost.errno, f"{lost.strerror} (flush)", str(path)) from lost


def _sync(path: Path) -> OSError | None:
    """Return the error of a flush that lost content. Any other may be tried again, and is raised."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        # A server has the names already, or refuses to flush them again; only content is in this machine's memory.
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
        return error
    finally:
        os.close(handle)
    return None


def sync_if_there(path: Path) -> None:
    """`sync` of a file that may not have been begun. If a flush loses content, the file is read and written anew.

    Nobody may append to the file meanwhile.
    """
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
    """Flush every file below a directory, every directory, and the directory's own name. Raises OSError.

    Each process flushes what it wrote itself: on a shared file system nobody can do it for a process of another node.

    Args:
        directory: with all that is below it.
        flushed: files that their writers have flushed.
    """
    _sync_below(directory, flushed)
    sync(directory.parent)


def _sync_below(directory: Path, flushed: Container[Path]) -> None:
    for path in files.listing(directory):
        if files.is_own_directory(path):
            _sync_below(path, flushed)
        elif path not in flushed and files.is_file(path):
            sync(path)
    sync(directory)
