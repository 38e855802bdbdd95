"""What is still there after a power cut: the one place that puts files and directories on disk.

A file is on disk once it was flushed, and so was the directory that names it. `files.write_atomic` does the first:
after a power cut there is the old content or the new one. What must not be the old one (because somebody was told of
it, or because a manifest names it) is written by `write`, or flushed by `sync_tree` before it counts.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

from primeslurm.files import Content, write_atomic

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Of file systems that flush no directories: theirs are on disk when a call returns, or cannot be made to be."""


def write(path: Path, data: Content) -> None:
    """`write_atomic`, and on disk when this returns. Raises OSError."""
    write_atomic(path, data)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write` of indented JSON."""
    write(path, json.dumps(value, indent=2) + "\n")


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory with its parents, all on disk when this returns; those that are there stay as they are.

    Args:
        path: of the directory.
        mode: of this one, not of its parents.
    """
    if not path.is_dir():
        if path.parent != path:
            make_directory(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def make_anew(path: Path) -> None:
    """Make an empty directory in place of what is there, on disk when this returns."""
    if path.exists():
        shutil.rmtree(path)
    make_directory(path)


def rename(source: Path, target: Path) -> None:
    """Rename within a directory, on disk when this returns: what is below `source` has been flushed before."""
    source.rename(target)
    sync(target.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there, for good: what follows may rely on its absence."""
    if path.exists():
        path.unlink(missing_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush one file, or the names in one directory (of those that one may not list, nothing can be flushed).

    Raises:
        OSError: it is not on disk.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def sync_if_there(path: Path) -> None:
    """`sync` of a file that may not have been begun."""
    if path.exists():
        sync(path)
        sync(path.parent)


def sync_tree(directory: Path, flushed: Container[Path] = ()) -> None:
    """Flush every file below a directory, every directory, and the directory's own name. Raises OSError.

    Each process flushes what it wrote itself: on a shared file system nobody can do it for a process of another node.

    Args:
        directory: with all that is below it.
        flushed: files that their writers have flushed.
    """
    for root, _, names in os.walk(directory, topdown=False):
        for name in names:
            if (path := Path(root, name)) not in flushed and path.is_file():
                sync(path)
        sync(Path(root))
    sync(directory.parent)
