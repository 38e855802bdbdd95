"""Readers of records: whole JSON files, and files that grow by lines and may end with an incomplete line."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec

from primeslurm.base import files
from primeslurm.base.files import FileWatcher, read_json

T = TypeVar("T")
TAIL_BYTES = 256 * 1024
_CONVERT_LOCK = threading.Lock()


def read_record(path: Path, kind: type[T]) -> T | None:
    """Read a record; None if the file is missing (or not visible yet) or not JSON.

    Raises msgspec.ValidationError if the file holds another kind of record.
    """
    value = read_json(path)
    return None if value is None else _convert(value, kind, strict=True)


def find_record(path: Path, kind: type[T]) -> T | None:
    """Read an optional record. Return None also if the file holds another kind of record."""
    try:
        return read_record(path, kind)
    except msgspec.ValidationError:
        return None


def changed_record(file: FileWatcher, kind: type[T]) -> T | None:
    """Read a record that its writer replaces. Return None if it is unchanged or damaged: the next one follows soon."""
    value = file.changed()
    try:
        return None if value is None else _convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None


def _convert(value: Any, kind: type[T], *, strict: bool) -> T:
    # msgspec inspects a type at its first use, without a lock. A second thread that used the type meanwhile crashed the
    # process: it happened to one of 518 agents, whose preflight thread also read the head's view.
    with _CONVERT_LOCK:
        return msgspec.convert(value, kind, strict=strict, str_keys=True)


def whole_lines(path: Path) -> list[bytes]:
    """Read the complete lines of a file; none if the file is missing."""
    try:
        return files.read_bytes(path).split(b"\n")[:-1]
    except OSError:
        return []


def last_lines(path: Path, size: int = TAIL_BYTES) -> list[bytes]:
    """Read the complete lines within the last `size` bytes of a file; none if the file is missing."""

    def read(handle: BinaryIO) -> tuple[int, bytes]:
        begin = max(0, handle.seek(0, os.SEEK_END) - size)
        handle.seek(begin)
        return begin, handle.read()

    try:
        begin, data = files.reading(path, read)
    except OSError:
        return []
    return (data.partition(b"\n")[2] if begin else data).split(b"\n")[:-1]


# Most bytes of one read. The next read returns the rest.
LIMIT_BYTES = 64 << 20


class Appended(NamedTuple):
    """New complete lines of a file."""

    lines: list[bytes]
    replaced: bool  # the file is a new one or was truncated, so earlier lines do not count
    complete: bool  # nothing more could be read now


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
