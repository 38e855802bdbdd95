"""Parts of a batch on disk, which are read only when they are sent, so that no process holds a whole batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from primeslurm.base import files
from primeslurm.wire.batches.frames import Frame
from primeslurm.wire.decoding import DamagedError

READ_BYTES = 16 << 20  # size of one read [bytes]


@dataclass(frozen=True)
class FileRange:
    """Bytes `start` to `end` of a file."""

    path: Path
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def cut(self, start: int, end: int) -> FileRange:
        """Return bytes `start` to `end` of this range, or fewer if it ends before."""
        return replace(self, start=self.start + start, end=min(self.start + end, self.end))

    def read(self) -> memoryview:
        """Read the bytes. Raise DamagedError if the file cannot be read or is shorter."""
        buffer = np.empty(len(self), np.uint8)

        def read(file: Any) -> int:
            file.seek(self.start)
            done = 0
            while done < len(buffer) and (count := file.readinto(buffer[done:].data)):
                done += count
            return done

        try:
            done = files.reading(self.path, read)
        except OSError as error:
            raise DamagedError(str(error)) from error
        if done < len(buffer):
            raise DamagedError(f"{os.fspath(self.path)} ends at {self.start + done}, before {self.end}")
        return buffer.data


FrameSource = Frame | FileRange


@dataclass(frozen=True)
class StoredArray:
    """Rows of an array that are stored in a file, one after another."""

    content: FileRange
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, end: int) -> StoredArray:
        end = min(end, len(self))
        size = len(self.content) // max(1, len(self))
        return StoredArray(self.content.cut(start * size, end * size), self.dtype, (end - start, *self.shape[1:]))


def loaded(sources: Iterable[FrameSource]) -> Iterator[Frame]:
    """Yield the bytes of all sources. Read sources on disk in blocks. Raise DamagedError if that fails."""
    for source in sources:
        if isinstance(source, FileRange):
            for start in range(0, len(source), READ_BYTES):
                yield source.cut(start, start + READ_BYTES).read()
        else:
            yield source
