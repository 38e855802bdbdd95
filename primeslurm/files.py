"""Small files written so that a reader sees all of them or nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
Content = bytes | str | Iterable[bytes | memoryview]
"""Of a file: whole, or in parts, which are written one after another without being joined."""


def write_atomic(path: Path, data: Content) -> None:
    """Write beside the target, flush to disk, rename over it.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    raw = data.encode() if isinstance(data, str) else data
    parts = [raw] if isinstance(raw, bytes) else raw
    # Of this call alone: another thread, or a process of the same number on another node, may write the same file.
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        with temporary.open("wb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:  # also of who makes the parts
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON in a file, or None if it is not there (or, on a shared file system, not there yet) or no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def digest(path: Path) -> str:
    """blake2b-128 of a file, in hex."""
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 22):
            hasher.update(chunk)
    return hasher.hexdigest()


class Watched:
    """A JSON file that others replace: decoded only when it is another one than last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> Any | None:
        """The content if it changed since the last call, else None (also while the file is missing or half there)."""
        try:
            # Opened, not only looked at: that is what makes a network file system ask its server.
            with self._path.open("rb") as handle:
                status = os.fstat(handle.fileno())
                key = (status.st_ino, status.st_mtime_ns, status.st_size)
                if key == self._seen:
                    return None
                value = json.loads(handle.read())
        except (OSError, ValueError, RecursionError):
            return None
        self._seen = key
        return value
