"""Writes the files through which an agent or the head communicates, and notes faults of their file system.

While this process cannot read or write them, it blames no other process for missing heartbeats: the others may be
unable to write, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from primeslurm.base.durable import RESERVE_RELEASED, fill_reserve, free_bytes, may_recover, reserve_released
from primeslurm.base.files import is_transient

FILL_S = 5.0  # period of trying to fill the reserve again
NO_SPACE = 2**20  # with less space than this, some records can be written and others cannot. [bytes]
T = TypeVar("T")


class RecordWriter:
    """State of the run's file system, as one agent or the head sees it.

    A fault excuses missing heartbeats of other processes for `excuse_s`.
    """

    def __init__(self, run_dir: Path, excuse_s: float) -> None:
        self._run_dir = run_dir
        self.excuse_s = excuse_s
        self._filled_at = -math.inf
        self._since: float | None = None
        self.fault = ""  # why the newest record could not be written
        self.unread = ""  # why records of others could not be read at the last look

    def write(self, action: Callable[[], object]) -> bool:
        """Write a record. Return False on a fault of the file system that may pass; then call again later.

        Raises:
            OSError: another error.
        """
        try:
            action()
        except OSError as error:
            if not may_recover(error):
                raise
            self.fault = error.strerror or str(error)
            return False
        self.fault = ""
        return True

    def read(self, action: Callable[[], T], otherwise: T) -> T:
        """Read a record. Note an outage of the file system, and return `otherwise`."""
        try:
            return action()
        except OSError as error:
            if not is_transient(error):
                raise
            self.unread = str(error)
            return otherwise

    @property
    def trouble(self) -> str:
        if self.fault or self.unread or reserve_released(self._run_dir):
            return self.fault or self.unread or RESERVE_RELEASED
        free = free_bytes(self._run_dir)
        return RESERVE_RELEASED if free is not None and free < NO_SPACE else ""

    def excuses(self, now: float) -> bool:
        """Return whether a fault excuses other processes now. It does so for `excuse_s`."""
        if not self.trouble:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since <= self.excuse_s

    def fill_reserve(self, now: float) -> None:
        """Make or fill the reserve of the run from time to time. Only the head does this."""
        if now - self._filled_at >= FILL_S:
            self._filled_at = now
            fill_reserve(self._run_dir)
