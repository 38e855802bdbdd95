"""Addresses of an attempt's processes: the head publishes them, other processes look them up by process name.

A process that moves to another node keeps its name. Callers look up the address before each use and thus follow it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path

import msgspec

from primeslurm.base.files import FileWatcher

FILE = "addresses.json"  # name of the file in the attempt directory


class Addresses(msgspec.Struct, frozen=True):
    """The content of `addresses.json`: host and ports of each process of the attempt."""

    hosts: dict[str, str]  # address of the node of each process
    ports: dict[str, dict[str, int]]  # port numbers of each process, by name of the port
    # Processes that were given up for this attempt, because their node is lost and no spare replaces it.
    lost: list[str] = []


def unreachable(number: int, ports: Iterable[str]) -> tuple[str, dict[str, int]]:
    """Return the host and ports of the run's process `number` if its node was lost before it had an address."""
    # Connections are refused at once: on the loopback interface, only root may listen on ports below 1024. Each process
    # has a host of its own, because routers list their engines by URL.
    return str(ip_address("127.1.0.0") + number), {name: port for port, name in enumerate(ports, start=1)}


PERIOD_S = 1.0  # minimum interval between two checks of the file


class AddressBook:
    """Looks up addresses in an attempt's `addresses.json`, which it reads again after a second."""

    def __init__(self, attempt_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = attempt_dir / FILE
        self._file = FileWatcher(self._path)
        self._clock = clock
        self._checked_at: float | None = None
        self._addresses: Addresses | None = None

    def url(self, name: str) -> str:
        """Return the base URL of the `http` port of a process. Raises LookupError if none is published."""
        addresses = self._read()
        return f"http://{addresses.hosts[name]}:{addresses.ports[name]['http']}"

    @property
    def lost(self) -> frozenset[str]:
        return frozenset(self._read().lost)

    def _read(self) -> Addresses:
        now = self._clock()
        if self._addresses is None or self._checked_at is None or now - self._checked_at >= PERIOD_S:
            self._checked_at = now
            value = self._file.changed(wait=self._addresses is None)
            if value is not None:
                with contextlib.suppress(msgspec.ValidationError):  # a damaged file does not replace good addresses
                    self._addresses = msgspec.convert(value, Addresses)
        if self._addresses is None:
            raise LookupError(f"{self._path} has not been published")
        return self._addresses
