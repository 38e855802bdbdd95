"""Writes the small files by which agents and head speak, also while the file system is full.

An agent that cannot write or read them, or sees that there is no space, takes nobody for unresponsive: the others may
not be able to write either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from primeslurm.base.files import is_transient
from primeslurm.records.reserve import GIVEN_UP, Reserve, free_bytes, may_pass

FILL_S = 5.0
"""Between two looks whether the reserve can be filled again."""
T = TypeVar("T")
NO_SPACE = 2**20
"""With less than this, in bytes, some records can be written and others cannot."""


class RecordWriter:
    """One agent's, or the head's.

    Args:
        run_dir: the run's directory.
        patience_s: how long a fault may excuse the silence of others.
    """

    def __init__(self, run_dir: Path, patience_s: float) -> None:
        self._run_dir = run_dir
        self.patience_s = patience_s
        self._reserve = Reserve(run_dir)
        self._filled_at = -math.inf
        self._since: float | None = None
        self.fault = ""
        """What kept the newest record from being written; empty if it is."""
        self.unread = ""
        """What kept the others' records from being read at the last look; empty if they were."""

    def write(self, action: Callable[[], object]) -> bool:
        """Write a record, out of the reserve if need be. Returns whether it is written; if not, try again later.

        Raises:
            OSError: it cannot be written for another reason than the file system.
        """
        try:
            self._reserve.spend_on(action)
        except OSError as error:
            if not may_pass(error) and not is_transient(error):
                raise
            self.fault = error.strerror or str(error)
            return False
        self.fault = ""
        return True

    def read(self, action: Callable[[], T], otherwise: T) -> T:
        """Read a record that is read again soon; `otherwise` while the file system is away, which is noted."""
        try:
            return action()
        except OSError as error:
            if not is_transient(error):
                raise
            self.unread = str(error)
            return otherwise

    @property
    def trouble(self) -> str:
        """What is wrong with the file system as far as it can be seen here; empty: nothing."""
        if self.fault or self.unread or self._reserve.given_up:
            return self.fault or self.unread or GIVEN_UP
        free = free_bytes(self._run_dir)
        return GIVEN_UP if free is not None and free < NO_SPACE else ""

    def excuses(self, now: float) -> bool:
        """Whether others may be silent because nobody can write, which is so for a while only."""
        if not self.trouble:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since <= self.patience_s

    def fill_reserve(self, now: float) -> None:
        """Make the reserve, or fill it again, from time to time. For the head."""
        if now - self._filled_at >= FILL_S:
            self._filled_at = now
            self._reserve.fill()
