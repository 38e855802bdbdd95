"""Process heartbeats: a main loop reports that it runs, in which phase it is, and how long that phase may take.

The agent creates a page of shared memory for each process and passes it on as a file descriptor. A heartbeat is a few
bytes in that page, so it needs no file system and no other user can reach it. The page has one writer and one reader.
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

# Environment variable with the descriptor of the page, set for processes whose agent expects heartbeats.
VARIABLE = "PRIMESLURM_BEAT"
# Shortest time between two heartbeats of an agent or of the head, in the records of the run [s]. Large
# `deployment.node_silent_s` make it longer (`Plan.heartbeat_s`).
NODE_HEARTBEAT_S = 1.0
# Makes a process that sends heartbeats write the stacks of all its threads to its log, even while it is stuck.
DUMP_SIGNAL = signal.SIGRTMIN + 8

_SIZE = mmap.PAGESIZE
# Number of the heartbeat, step (-1: none), timeout [s] (0: default), phase, and the number again: a reader that finds
# two different numbers has read in the middle of a write.
_HEARTBEAT = struct.Struct("<Qqd48sQ")
_COLLECTIVES = struct.Struct("<Q")
_COLLECTIVES_AT = 128


class Heartbeat(NamedTuple):
    """The last heartbeat of a process."""

    number: int = 0  # heartbeats so far; 0 before the first one
    phase: str = ""
    step: int | None = None
    limit_s: float = 0.0  # timeout of this phase; 0: the default of the process
    collectives: int = 0  # collectives begun so far, over all process groups


class LivenessReporter:
    """Sends the heartbeats of this process, if `page` is shared with an agent. Without a page nobody reads them."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        self._page: mmap.mmap | bytearray = bytearray(_SIZE) if page is None else page
        self._number = 0
        self._phase = (b"", -1, 0.0)

    def enter(self, phase: str, step: int | None = None, limit_s: float = 0.0) -> None:
        """Begin a phase, whose name has at most 48 bytes. Heartbeats may be `limit_s` [s] apart; 0: the default."""
        self._phase = (phase.encode()[:48], -1 if step is None else step, limit_s)
        self.heartbeat()

    def heartbeat(self) -> None:
        self._number += 1
        phase, step, limit_s = self._phase
        self._page[: _HEARTBEAT.size] = _HEARTBEAT.pack(self._number, step, limit_s, phase, self._number)

    def count_collectives(self, begun: int) -> None:
        """Report the number of collectives begun so far. Any thread may call this; it is not a heartbeat."""
        self._page[_COLLECTIVES_AT : _COLLECTIVES_AT + _COLLECTIVES.size] = _COLLECTIVES.pack(begun)


class HeartbeatPage:
    """The agent's end of the page of one process."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"beat-{name}")
        os.truncate(self.descriptor, _SIZE)
        self._page = mmap.mmap(self.descriptor, _SIZE)
        self._last = Heartbeat()

    def read(self) -> Heartbeat:
        number, step, limit_s, phase, again = _HEARTBEAT.unpack_from(self._page)
        if number == again:
            begun: int = _COLLECTIVES.unpack_from(self._page, _COLLECTIVES_AT)[0]
            # The process may write any bytes. With a negative or infinite timeout it would be unresponsive at once, or
            # never.
            limit_s = limit_s if 0 < limit_s < math.inf else 0.0
            text = phase.rstrip(b"\0").decode(errors="replace")
            self._last = Heartbeat(number, text, None if step < 0 else step, limit_s, begun)
        return self._last

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)


@functools.cache
def liveness() -> LivenessReporter:
    """Return the reporter of this process, made at the first call."""
    return from_environment(os.environ)


def from_environment(environ: MutableMapping[str, str]) -> LivenessReporter:
    """Map the page that the agent has passed on, if any, and hide it from processes that this one starts."""
    text = environ.pop(VARIABLE, "")
    if not text:
        return LivenessReporter()
    descriptor = int(text)
    page = mmap.mmap(descriptor, _SIZE)
    os.close(descriptor)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    return LivenessReporter(page)
