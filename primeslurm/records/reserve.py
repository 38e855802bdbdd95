"""Space for records on a full file system: `<run>/.reserve`, a file that is emptied when there is none left.

Whoever cannot write a record for want of space empties the reserve and writes again; the head fills it when there is
space. While it is empty, what is large waits (rollouts, checkpoints, policies), or it would take the space at once.
A run directory without the file has no reserve, and nothing waits for it.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from primeslurm.base import files
from primeslurm.base.files import write_atomic
from primeslurm.records.heartbeats import liveness

log = logging.getLogger(__name__)
FILE = ".reserve"
RESERVE_BYTES = 16 * 2**20
"""Enough for the heartbeats and events of a thousand nodes, for a while."""
LEAST_FREE = 2**28
"""A run does not begin with less than this."""
GIVEN_UP = "the file system of the run directory is full, or was until a moment ago"
"""What an empty reserve says."""
PAUSE_S = 2.0
"""Between two tries to write what there is no space for."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS,)
T = TypeVar("T")


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no space: then the reserve helps."""
    return _says(error, _FULL)


def may_pass(error: BaseException) -> bool:
    """Whether an error may be the file system's, for a while: it is full, or was made read-only."""
    return _says(error, _FULL + _READ_ONLY)


def _says(error: BaseException, numbers: Collection[int]) -> bool:
    """Whether an error is one of these, also if it is another one's in words (safetensors, DCP, another process)."""
    words = "|".join(re.escape(os.strerror(number)) for number in numbers)
    return (isinstance(error, OSError) and error.errno in numbers) or bool(re.search(words, str(error)))


def free_bytes(directory: Path) -> int | None:
    """Return what is free in the file system of a directory; None if it cannot be asked."""
    try:
        return files.retrying(directory, lambda: shutil.disk_usage(directory).free)
    except OSError:
        return None


def shortage(directory: Path, least: int = LEAST_FREE) -> str:
    """Tell in words that there is too little space in a directory; empty if there is enough, or nobody knows."""
    free = free_bytes(directory)
    if free is None or free >= least:
        return ""
    return f"{free / 2**30:.2f} GiB free in {directory}, a run needs {least / 2**30:.2f} GiB"


def warn(error: Exception) -> None:
    """Say in the log what the file system did not take, and why."""
    log.warning("waits for the file system: %s", error)


def pause(pause_s: float) -> None:
    """Let seconds pass between two tries. Who waits does not hang."""
    liveness().heartbeat()
    time.sleep(pause_s)


def until_written(
    action: Callable[[], T],
    within_s: float = math.inf,
    pause_s: float = PAUSE_S,
    refused: Callable[[Exception], None] = warn,
) -> T:
    """Call something until the file system takes it.

    Args:
        action: writes; it begins anew each time.
        within_s: for how long it is tried, in seconds.
        pause_s: between two tries, in seconds.
        refused: is told why the file system did not take it, each time that it is going to be tried again.

    Raises:
        Exception: what `action` raised last after `within_s`, and at once what is no fault of the file system.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return action()
        except Exception as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
            refused(error)
        pause(pause_s)


class Reserve:
    """The reserve of one run.

    Args:
        run_dir: its directory.
        size: of the reserve, in bytes.
    """

    def __init__(self, run_dir: Path, size: int = RESERVE_BYTES) -> None:
        self._path = run_dir / FILE
        self._size = size

    @property
    def given_up(self) -> bool:
        """Whether it was emptied, and has not been filled again."""
        try:
            found = files.status(self._path)
        except OSError:
            return False
        return found is not None and found.st_size < self._size

    def give_up(self) -> bool:
        """Empty it. Returns whether there was anything in it."""
        try:
            found = files.status(self._path)
            if found is not None:
                files.retrying(self._path, lambda: os.truncate(self._path, 0))
        except OSError:
            return False
        return found is not None and found.st_size > 0

    def fill(self) -> bool:
        """Make it, or fill it again, if there is space for two. Returns whether it is held now."""
        if self._is_held():
            return True
        if (free_bytes(self._path.parent) or 0) < 2 * self._size:
            return False
        try:
            # Not only allocated: a file system that compresses or copies on write would keep nothing.
            write_atomic(self._path, os.urandom(self._size))
        except OSError:
            return False
        return True

    def _is_held(self) -> bool:
        try:
            return files.is_file(self._path) and not self.given_up
        except OSError:
            return False

    def spend_on(self, write: Callable[[], T]) -> T:
        """Write a record; if there is no space, empty the reserve and write again. Raises OSError."""
        try:
            return write()
        except OSError as error:
            if not is_full(error) or not self.give_up():
                raise
        return write()

    def give_way(self, write: Callable[[], object]) -> str:
        """Write what is large, but not into space that was given up: that is for records.

        Returns:
            Why it has to be written later; empty if it is written.

        Raises:
            OSError: it cannot be written, and the file system is neither full, nor read-only, nor away.
        """
        if self.given_up:
            return GIVEN_UP
        try:
            write()
        except OSError as error:
            if not may_pass(error) and not files.is_transient(error):
                raise
            return str(error)
        return ""
