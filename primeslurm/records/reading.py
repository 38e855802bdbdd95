"""Readers of records: whole JSON files, and files that grow by lines and may end with an incomplete line."""

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
