"""HeartbeatLimits: a process's main loop says that it goes on, where it is, and how long that may take.

A beat is a few bytes in a page of memory that the process's agent made and handed down as a file descriptor: nothing of
it is on any file system, nobody else can name it, and it goes with the two of them. One writer, one reader: what a
writer was in the middle of is read again.
"""

from __future__ import annotations

import faulthandler
import functools
import math
import mmap
import os
import signal
import struct
from collections.abc import MutableMapping
from typing import NamedTuple

VARIABLE = "PRIMESLURM_BEAT"
"""Descriptor of the page, in the environment of a process that its agent expects to beat."""
DUMP_SIGNAL = signal.SIGRTMIN + 8
"""Has a process that beats write the stacks of all its threads to its log, in whatever it is."""

_SIZE = mmap.PAGESIZE
_BEAT = struct.Struct("<Qqd48sQ")
"""Number of the beat, step (-1: none), limit in seconds (0: the usual one), phase; and the number again."""
_COLLECTIVES = struct.Struct("<Q")
_COLLECTIVES_AT = 128


class Heartbeat(NamedTuple):
    """What a process said last."""

    number: int = 0
    """How many beats there were; 0: it has not begun."""
    phase: str = ""
    step: int | None = None
    limit_s: float = 0.0
    """It may be silent for so long in this phase; 0: as long as its kind may."""
    collectives: int = 0
    """Collectives that it has begun, of all its process groups together."""


class LivenessReporter:
    """The end of the process that beats.

    Args:
        page: shared with the agent. Default: there is none, and nobody looks.
    """

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self._page: mmap.mmap | bytearray = bytearray(_SIZE) if page is None else page
        self._number = 0
        self._where = (b"", -1, 0.0)

    def enter(self, phase: str, step: int | None = None, limit_s: float = 0.0) -> None:
        """Begin a phase, which is a beat.

        Args:
            phase: its name, at most 48 bytes.
            step: that it belongs to.
            limit_s: it may be silent for so long in this phase. Default: as long as its kind may.
        """
        self._where = (phase.encode()[:48], -1 if step is None else step, limit_s)
        self.heartbeat()

    def heartbeat(self) -> None:
        """Say that the main loop goes on."""
        self._number += 1
        phase, step, limit_s = self._where
        self._page[: _BEAT.size] = _BEAT.pack(self._number, step, limit_s, phase, self._number)

    def count_collectives(self, begun: int) -> None:
        """Say how many collectives were begun. From any thread: it is no beat."""
        self._page[_COLLECTIVES_AT : _COLLECTIVES_AT + _COLLECTIVES.size] = _COLLECTIVES.pack(begun)


class HeartbeatPage:
    """The agent's end: the page of one process, from its start to its end.

    Args:
        name: of the process, for those who look at the agent's open files.
    """

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"beat-{name}")
        os.truncate(self.descriptor, _SIZE)
        self._page = mmap.mmap(self.descriptor, _SIZE)
        self._last = Heartbeat()

    def read(self) -> Heartbeat:
        """Return what the process said last."""
        number, step, limit_s, phase, again = _BEAT.unpack_from(self._page)
        if number == again:  # or it is being written just now
            begun: int = _COLLECTIVES.unpack_from(self._page, _COLLECTIVES_AT)[0]
            words = phase.rstrip(b"\0").decode(errors="replace")
            limit_s = limit_s if 0 < limit_s < math.inf else 0.0  # or it would hang at once, or never
            self._last = Heartbeat(number, words, None if step < 0 else step, limit_s, begun)
        return self._last

    def close(self) -> None:
        """Give the page up."""
        self._page.close()
        os.close(self.descriptor)


@functools.cache
def liveness() -> LivenessReporter:
    """Return this process's own pulse, made at the first call."""
    return from_environment(os.environ)


def from_environment(environ: MutableMapping[str, str]) -> LivenessReporter:
    """Take the page that an agent has handed down, if it has, so that nothing that this process starts inherits it."""
    handed = environ.pop(VARIABLE, "")
    if not handed:
        return LivenessReporter()
    descriptor = int(handed)
    page = mmap.mmap(descriptor, _SIZE)
    os.close(descriptor)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    return LivenessReporter(page)
