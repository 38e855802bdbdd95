"""Manifests: records of files with their size and digest. A directory is complete once its manifest is written."""

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
from primeslurm.wire.stored import checksums

T = TypeVar("T")
MAX_NAME_BYTES = 255  # longest name of a file or directory on Linux file systems
_READ_THREADS = 8  # threads that read files in parallel, because one thread cannot keep several disks or servers busy


class FileRecord(msgspec.Struct, frozen=True):
    """One file, named relative to its manifest's directory."""

    name: str
    bytes: int
    digest: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.name).parts
        valid = all(len(part.encode()) <= MAX_NAME_BYTES and "\0" not in part for part in parts)
        if not parts or self.name.startswith("/") or ".." in parts or not valid:
            raise ValueError(f"{self.name[:80]!r} is not the name of a file below the manifest's directory")


def describe(directory: Path, parts: Iterable[Path]) -> list[FileRecord]:
    """Read files below `directory` and return their records, sorted by path."""
    return [
        FileRecord(str(path.relative_to(directory)), files.retrying(path, path.stat).st_size, digest(path))
        for path in sorted(parts)
    ]


def differing(directory: Path, records: Sequence[FileRecord]) -> list[str]:
    """Read all files and return one error text per file that is missing or differs from its record."""

    def check(record: FileRecord) -> str:
        path = directory / record.name
        if problem := _size_problem(directory, record):
            return problem
        return "" if checksums.same(path, record.digest) else describe_difference(path)

    with ThreadPoolExecutor(min(_READ_THREADS, os.cpu_count() or 1)) as readers:
        return [problem for problem in readers.map(check, records) if problem]


def missing_or_resized(directory: Path, records: Iterable[FileRecord]) -> list[str]:
    """Return one error text per file that is missing or has another size. No file is read."""
    return [problem for record in records if (problem := _size_problem(directory, record))]


def absent(directory: Path, records: Iterable[FileRecord]) -> list[str]:
    """Return the names of files that do not exist, or that this node does not see yet."""
    return [record.name for record in records if not files.is_file(directory / record.name)]


def describe_difference(path: Path) -> str:
    return f"{path}: differs from its record"


def write(path: Path, value: object) -> None:
    durable.write(path, msgspec.json.format(msgspec.json.encode(value), indent=2))


def read(path: Path, kind: type[T]) -> T | None:
    """Read a manifest of type `kind`. Return None if it does not exist or is damaged."""
    try:
        return parsed(path, kind)
    except DamagedError:
        return None


def parsed(path: Path, kind: type[T]) -> T | None:
    """Read a manifest of type `kind`. Return None if it does not exist.

    Raise DamagedError if the file exists, but is no valid manifest, and OSError if the file cannot be read.
    """
    try:
        return decode_json(files.read_bytes(path), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _size_problem(directory: Path, record: FileRecord) -> str:
    path = directory / record.name
    status = files.status(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return f"{path}: does not exist"
    if status.st_size != record.bytes:
        return f"{describe_difference(path)}: {status.st_size} bytes instead of {record.bytes}"
    return ""
