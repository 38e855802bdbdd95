"""Records of files with size and digest, and of what makes a directory complete: a manifest written last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from primeslurm import durable
from primeslurm.files import digest
from primeslurm.wire.decoding import DamagedError, json_value
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


def describe(directory: Path, files: Iterable[Path]) -> list[FileRecord]:
    """Make records of `files` below `directory`, sorted by path."""
    return [FileRecord(str(p.relative_to(directory)), p.stat().st_size, digest(p)) for p in sorted(files)]


def differing(directory: Path, records: Sequence[FileRecord]) -> list[str]:
    """Say in words which files are missing or differ from their records. All are read, by several threads."""
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        sound = list(readers.map(lambda record: _matches(directory / record.name, record), records))
    return [differs(directory / record.name) for record, fine in zip(records, sound, strict=True) if not fine]


def misplaced(directory: Path, records: Iterable[FileRecord]) -> list[str]:
    """Say in words which files are missing or have another size than in their records. None is read."""
    return [differs(directory / record.name) for record in records if not _in_place(directory / record.name, record)]


def differs(path: Path) -> str:
    """Say of a file that it is not what its record says."""
    return f"{path}: differs from its record"


def write(path: Path, value: object) -> None:
    """Write a manifest, on disk when this returns: from here on its directory is complete."""
    durable.write(path, msgspec.json.format(msgspec.json.encode(value), indent=2))


def read(path: Path, kind: type[T]) -> T | None:
    """Read a manifest; None if there is no readable one."""
    try:
        return json_value(path.read_bytes(), kind)
    except (FileNotFoundError, NotADirectoryError, DamagedError):
        return None


def _matches(path: Path, record: FileRecord) -> bool:
    return _in_place(path, record) and digests.same(path, record.digest)


def _in_place(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes
