"""Writes that survive a power cut. Only this module flushes files and directories to disk.

A file survives if both its content and the directory that names it are flushed. `files.write_atomic` flushes the
content only: after a power cut the file has the old or the new content. Use `write` or `sync_tree` if the old content
would be wrong, for example because another process has been told about the new one, or a manifest names it.

A failed flush of a file is never retried alone: the kernel reports a lost page once, and the next flush succeeds
without it. Only the owner of the content can write it again.
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
"""Errors of file systems that cannot flush directories."""


def write(path: Path, data: Content) -> None:
    """Replace a file as `write_atomic` does. On return it is on disk."""

    def once() -> None:
        write_atomic(path, data)
        sync(path.parent)

    files.retrying(path, once)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2) + "\n")


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its missing parents. On return all are on disk. `mode` applies to the directory alone."""
    if not files.is_dir(path):
        if path.parent != path:
            make_directory(path.parent)
        files.retrying(path, lambda: path.mkdir(mode, exist_ok=True))
        sync(path.parent)


def make_anew(path: Path) -> None:
    """Replace whatever is at `path` by an empty directory."""
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
    """Flush all files and directories below a directory, and the directory's own name.

    Call it in the process that wrote the files: on a shared file system no process can flush what another node wrote.

    Args:
        directory: root of the tree.
        flushed: files to skip, because their writers have flushed them.
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
