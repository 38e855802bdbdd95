"""Where every process of an attempt listens: published by the head, looked up by process name wherever it is needed.

A process that moves to another node keeps its name, so whoever asks here before each use follows it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from primeslurm.wire.files import Watched

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


class AddressBook:
    """The newest `addresses.json` of an attempt; it is read again whenever it has changed."""

    def __init__(self, attempt_dir: Path) -> None:
        self._path = attempt_dir / FILE
        self._file = Watched(self._path)
        self._known: Addresses | None = None

    def url(self, name: str) -> str:
        """Base URL of a process's `http` port. Raises LookupError if it has none."""
        known = self._read()
        return f"http://{known.hosts[name]}:{known.ports[name]['http']}"

    @property
    def lost(self) -> frozenset[str]:
        """Processes that were given up."""
        return frozenset(self._read().lost)

    def _read(self) -> Addresses:
        value = self._file.changed()
        if value is not None:
            self._known = msgspec.convert(value, Addresses)
        if self._known is None:
            raise LookupError(f"{self._path} has not been published")
        return self._known
