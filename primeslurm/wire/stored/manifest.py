"""Records of files with size and digest, and of what makes a directory complete: a manifest written last."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import digest
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.stored import digests

T = TypeVar("T")
LONGEST_NAME = 255
"""Bytes of the name of a file or a directory."""
_READERS = 8
"""Threads that read files to check them: more than one disk or server answers."""


class FileRecord(msgspec.Struct, frozen=True):
    """One file, named relative to the directory that is described."""

    name: str
    bytes: int
    digest: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.name).parts
        nameable = all(len(part.encode()) <= LONGEST_NAME and "\0" not in part for part in parts)
        if not parts or self.name.startswith("/") or ".." in parts or not nameable:
            raise ValueError(f"{self.name[:80]!r} is outside of what is described, or no file's name")


def describe(directory: Path, parts: Iterable[Path]) -> list[FileRecord]:
    """Make records of files below `directory`, sorted by path."""
    return [FileRecord(str(p.relative_to(directory)), _size(p), digest(p)) for p in sorted(parts)]


def differing(directory: Path, records: Sequence[FileRecord]) -> list[str]:
    """Say in words which files are missing or differ from their records. All are read, by several threads."""
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        found = readers.map(lambda record: _misplaced(directory, record) or _differing(directory, record), records)
        return [text for text in found if text]


def misplaced(directory: Path, records: Iterable[FileRecord]) -> list[str]:
    """Say in words which files are missing or have another size than in their records. None is read."""
    return [text for record in records if (text := _misplaced(directory, record))]


def absent(directory: Path, records: Iterable[FileRecord]) -> list[str]:
    """Name the files that are not there, or that this node does not see yet."""
    return [record.name for record in records if not files.is_file(directory / record.name)]


def differs(path: Path) -> str:
    """Say of a file that it is not what its record says."""
    return f"{path}: differs from its record"


def write(path: Path, value: object) -> None:
    """Write a manifest, on disk when this returns: from here on its directory is complete."""
    durable.write(path, msgspec.json.format(msgspec.json.encode(value), indent=2))


def read(path: Path, kind: type[T]) -> T | None:
    """Read a manifest; None if there is no readable one."""
    try:
        return parsed(path, kind)
    except DamagedError:
        return None


def parsed(path: Path, kind: type[T]) -> T | None:
    """Read a manifest; None if there is none.

    Raises:
        DamagedError: there is one, and its content is no manifest.
        OSError: it cannot be read.
    """
    try:
        return decode_json(files.read_bytes(path), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _misplaced(directory: Path, record: FileRecord) -> str:
    path = directory / record.name
    found = files.status(path)
    if found is None or not stat.S_ISREG(found.st_mode):
        return f"{path}: is not there"
    if found.st_size != record.bytes:
        return f"{differs(path)}: {found.st_size} bytes instead of {record.bytes}"
    return ""


def _differing(directory: Path, record: FileRecord) -> str:
    path = directory / record.name
    return "" if digests.same(path, record.digest) else differs(path)


def _size(path: Path) -> int:
    return files.retrying(path, path.stat).st_size
