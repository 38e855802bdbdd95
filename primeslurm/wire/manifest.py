"""Records of files with size and digest, and of what makes a directory complete: a manifest written last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from primeslurm import durable
from primeslurm.files import digest

T = TypeVar("T")


class FileRecord(msgspec.Struct, frozen=True):
    """One file, named relative to the directory that is described."""

    name: str
    bytes: int
    digest: str


def describe(directory: Path, files: Iterable[Path]) -> list[FileRecord]:
    """Make records of `files` below `directory`, sorted by path."""
    return [FileRecord(str(p.relative_to(directory)), p.stat().st_size, digest(p)) for p in sorted(files)]


def differing(directory: Path, records: Sequence[FileRecord]) -> list[str]:
    """Say in words which files are missing or differ from their records."""
    return [f"{directory / r.name}: differs from its record" for r in records if not _matches(directory / r.name, r)]


def write(path: Path, value: object) -> None:
    """Write a manifest, on disk when this returns: from here on its directory is complete."""
    durable.write(path, msgspec.json.format(msgspec.json.encode(value), indent=2))


def read(path: Path, kind: type[T]) -> T | None:
    """Read a manifest; None if there is no readable one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def _matches(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes and digest(path) == record.digest
