"""Reading what processes write: whole records, and files that grow by lines, the last of which may be half a line."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from primeslurm.base import files
from primeslurm.base.files import FileWatcher, read_json

T = TypeVar("T")
TAIL_BYTES = 256 * 1024
_ONE_AT_A_TIME = threading.Lock()


def read_record(path: Path, kind: type[T]) -> T | None:
    """Read a record.

    Returns:
        None if the file is not there (or, on a shared file system, not there yet) or no JSON.

    Raises:
        msgspec.ValidationError: it is another kind of record.
    """
    value = read_json(path)
    return None if value is None else _convert(value, kind, strict=True)


def find_record(path: Path, kind: type[T]) -> T | None:
    """Read a record that one can do without: None also if it is another kind of record."""
    try:
        return read_record(path, kind)
    except msgspec.ValidationError:
        return None


def changed_record(file: FileWatcher, kind: type[T]) -> T | None:
    """Read a record that its writer replaces again and again.

    Returns:
        None if it did not change, and if it is damaged: the next one will come.
    """
    value = file.changed()
    try:
        return None if value is None else _convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None


def _convert(value: Any, kind: type[T], *, strict: bool) -> T:
    """Convert plain data; never in two threads at once.

    msgspec works out what a type is made of at its first use. A thread that uses the type meanwhile reads what is not
    there yet, and the process dies of it: one of 518 agents did, as its preflight read the head's view, too.
    """
    with _ONE_AT_A_TIME:
        return msgspec.convert(value, kind, strict=strict, str_keys=True)


def whole_lines(path: Path) -> list[bytes]:
    """Read the complete lines of a file; none if there is no such file."""
    try:
        return files.read_bytes(path).split(b"\n")[:-1]
    except OSError:
        return []


def last_lines(path: Path, size: int = TAIL_BYTES) -> list[bytes]:
    """Read the complete lines in the last `size` bytes of a file; none if there is no such file."""

    def read(handle: BinaryIO) -> tuple[int, bytes]:
        begin = max(0, handle.seek(0, os.SEEK_END) - size)
        handle.seek(begin)
        return begin, handle.read()

    try:
        begin, data = files.reading(path, read)
    except OSError:
        return []
    return (data.partition(b"\n")[2] if begin else data).split(b"\n")[:-1]
