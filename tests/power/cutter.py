"""Cuts the power at a moment of a part of a run, so that each part is hit equally often."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

from tests.power.disk import Disk

PARTS = ("submit", "publish", "commit", "requeue", "rest")
"""Activities of a run that write. `rest` are rollouts, batches, progress and records between the others."""
CUT = 99
"""Exit code of the process that cut the power."""
_WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Cutter:
    """Counts the operations of this process and its forked children on a disk, and cuts the power at one of them.

    Args:
        at: the operation of that part at which to cut; None for never.
    """

    def __init__(self, disk: Disk, part: str = "", at: int | None = None) -> None:
        self._disk, self._part, self._at = disk, part, at
        self._root = f"{disk.path}/"
        self._counts = mmap.mmap(-1, 8 * len(PARTS) + 1)
        self._doing: list[str] = []

    @property
    def counts(self) -> dict[str, int]:
        """Number of operations so far, by part."""
        return dict(zip(PARTS, struct.unpack_from(f"<{len(PARTS)}Q", self._counts), strict=True))

    @property
    def fired(self) -> bool:
        """Whether the power was cut. Another thread may have ended the process because of an error that followed."""
        return bool(self._counts[-1])

    @contextlib.contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """Count the operations of all threads within the block for this part."""
        self._doing.append(part)
        try:
            yield
        finally:
            self._doing.remove(part)

    def watch(self) -> None:
        """Start to count, until the process ends."""
        flush = os.fsync

        def fsync(handle: Any) -> None:
            self._moment()
            flush(handle)
            self._moment()

        os.fsync = fsync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) and self._ours(path):
                self._moment()
        elif event in _WRITES and any(self._ours(each) for each in arguments[:2]):
            self._moment()

    def _ours(self, path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self._root)

    def _moment(self) -> None:
        part = (self._doing or ["rest"])[-1]
        count = self.counts[part] + 1
        struct.pack_into("<Q", self._counts, 8 * PARTS.index(part), count)
        if (part, count) == (self._part, self._at):
            self._counts[-1] = 1
            self._disk.cut()
            os._exit(CUT)


def points(count: int, moments: dict[str, int], rng: random.Random) -> list[tuple[str, int]]:
    """Draw the moments to hit: parts in turn, and of each part one moment from each of its equal intervals.

    Args:
        moments: number of moments of each part.
        rng: random generator. The order within a part is random, so that a prefix is a fair sample.
    """
    drawn = {}
    for number, part in enumerate(PARTS):
        stretches = len(range(number, count, len(PARTS)))
        drawn[part] = [1 + int((each + rng.random()) * moments[part] / stretches) for each in range(stretches)]
        rng.shuffle(drawn[part])
    return [(part, drawn[part].pop()) for part in itertools.islice(itertools.cycle(PARTS), count)]
