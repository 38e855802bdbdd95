"""What of a batch is on disk alone: it is read when it is sent, and nobody holds all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from primeslurm.base import files
from primeslurm.wire.batches.rollouts import Frame
from primeslurm.wire.decoding import DamagedError

PIECE = 16 << 20
"""Bytes that are read at once."""


@dataclass(frozen=True)
class FileRange:
    """Some bytes of a file."""

    path: Path
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def cut(self, start: int, end: int) -> FileRange:
        """Return the range of its bytes `start` to `end`, as far as it has them."""
        return replace(self, start=self.start + start, end=min(self.start + end, self.end))

    def read(self) -> memoryview:
        """Read it.

        Raises:
            DamagedError: the file cannot be read, or has fewer bytes.
        """
        room = np.empty(len(self), np.uint8)

        def read(file: Any) -> int:
            file.seek(self.start)
            done = 0
            while done < len(room) and (count := file.readinto(room[done:].data)):
                done += count
            return done

        try:
            done = files.reading(self.path, read)
        except OSError as error:
            raise DamagedError(str(error)) from error
        if done < len(room):
            raise DamagedError(f"{os.fspath(self.path)} ends at {self.start + done}, before {self.end}")
        return room.data


Part = Frame | FileRange


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, one row after another."""

    content: FileRange
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, end: int) -> StoredArray:
        """Return some of its rows; `end` may be behind the last one."""
        end = min(end, len(self))
        size = len(self.content) // max(1, len(self))
        return StoredArray(self.content.cut(start * size, end * size), self.dtype, (end - start, *self.shape[1:]))


def loaded(parts: Iterable[Part]) -> Iterator[Frame]:
    """Give out the bytes of some parts; those on disk are read piece by piece. Raises DamagedError."""
    for part in parts:
        if isinstance(part, FileRange):
            for start in range(0, len(part), PIECE):
                yield part.cut(start, start + PIECE).read()
        else:
            yield part
