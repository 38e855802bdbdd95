"""Reads a file that other processes append to, each time only what is new."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from primeslurm.base import files

# Most bytes of one read. The next read returns the rest.
LIMIT_BYTES = 64 << 20


class Appended(NamedTuple):
    """New complete lines of a file."""

    lines: list[bytes]
    replaced: bool
    """The file is a new one or was truncated, so earlier lines do not count."""
    complete: bool
    """Nothing more could be read now."""


class GrowingFile:
    """A file that is read piece by piece. It may not exist yet. One read returns at most `limit` bytes."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._inode: int | None = None
        self._offset = 0
        self._seen: tuple[int, int, int] | None = None

    def appended(self) -> Appended:
        """Return the lines written since the last call. Raises OSError, except for a missing file."""
        try:
            return files.reading(self.path, self._read)
        except (FileNotFoundError, NotADirectoryError):
            replaced, self._inode, self._offset, self._seen = self._inode is not None, None, 0, None
            return Appended([], replaced, True)

    def _read(self, handle: BinaryIO) -> Appended:
        about = os.fstat(handle.fileno())
        seen = (about.st_ino, about.st_size, about.st_mtime_ns)
        if seen == self._seen:
            return Appended([], False, True)
        replaced = self._inode is not None and (about.st_ino != self._inode or about.st_size < self._offset)
        start = 0 if replaced or self._inode is None else self._offset
        handle.seek(start)
        data = handle.read(min(self._limit, max(0, about.st_size - start)))
        end = data.rfind(b"\n") + 1
        if not end and len(data) == self._limit:  # one line longer than the limit cannot be a record: skip it
            end = len(data)
        complete = start + len(data) >= about.st_size
        self._inode, self._offset = about.st_ino, start + end
        self._seen = seen if complete else None
        return Appended(data[:end].split(b"\n")[:-1], replaced, complete)
