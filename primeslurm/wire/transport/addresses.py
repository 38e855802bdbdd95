"""Where every process of an attempt listens: published by the head, looked up by process name wherever it is needed.

A process that moves to another node keeps its name, so whoever asks here before each use follows it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from primeslurm.base.files import FileWatcher

FILE = "addresses.json"
"""Name of the file in the attempt directory."""


class Addresses(msgspec.Struct, frozen=True):
    """`addresses.json`."""

    hosts: dict[str, str]
    """Process name to the address of its node."""
    ports: dict[str, dict[str, int]]
    """Process name to port name to port number."""
    lost: list[str] = []
    """Processes that were given up for this attempt, because their node is gone and none replaces it."""


PERIOD_S = 1.0
"""An address book is compared with its file no more often than this."""


class AddressBook:
    """The `addresses.json` of an attempt, never older than a second."""

    def __init__(self, attempt_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = attempt_dir / FILE
        self._file = FileWatcher(self._path)
        self._clock = clock
        self._looked_at: float | None = None
        self._known: Addresses | None = None

    def url(self, name: str) -> str:
        """Return the base URL of a process's `http` port.

        Raises:
            LookupError: it has none, or nothing was published yet.
        """
        known = self._read()
        return f"http://{known.hosts[name]}:{known.ports[name]['http']}"

    @property
    def lost(self) -> frozenset[str]:
        """Return the names of processes that were given up."""
        return frozenset(self._read().lost)

    def _read(self) -> Addresses:
        now = self._clock()
        if self._known is None or self._looked_at is None or now - self._looked_at >= PERIOD_S:
            self._looked_at = now
            value = self._file.changed(wait=self._known is None)
            if value is not None:
                with contextlib.suppress(msgspec.ValidationError):  # damaged: what was known holds
                    self._known = msgspec.convert(value, Addresses)
        if self._known is None:
            raise LookupError(f"{self._path} has not been published")
        return self._known
