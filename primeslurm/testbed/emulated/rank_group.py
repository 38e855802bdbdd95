"""Connects the emulated trainer's ranks: each rank has one TCP connection to rank 0, at the rendezvous address.

Rank 0 fails if another rank dies, and the others fail if rank 0 dies. A rank that gets SIGUSR1 tells rank 0. All ranks
exit with rank 0's exit code. Connections pass the gate and the tunnels of the real ranks (`wire.transport.rendezvous`),
which admit only processes with the run's secret.

The module imports little beyond the standard library, because hundreds of ranks run nothing else.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from types import FrameType

from primeslurm.records.heartbeats import liveness
from primeslurm.wire.transport import rendezvous

# Longest wait for all ranks [s], as in torch's rendezvous.
JOIN_TIMEOUT_S = 600.0
INTERRUPT = b"i"
# Message of a rank that has reached the next collective.
ARRIVED = b"a"
# Message of rank 0 when all ranks have arrived. Lower bytes are exit codes.
GO = bytes([200])
# Longest wait for the other ranks to take the exit code [s].
_CLOSE_S = 10.0


class LostRankError(Exception):
    """A rank died, or did not connect in time."""


class Ranks:
    """Rank 0's side. It accepts `others` ranks, then closes its port and watches the ranks from a thread."""

    def __init__(self, host: str, port: int, others: int) -> None:
        self._others = others
        self._connections: list[socket.socket] = []
        self._liveness = liveness()
        self._begun = 0
        self._arrived = threading.Semaphore(0)
        self._interrupted = threading.Event()
        self._closing = threading.Event()
        self._listener = rendezvous.listen_behind_gate(host, port)

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait for all ranks, then watch them. Raise LostRankError after `timeout_s`."""
        with self._listener:
            deadline = time.monotonic() + timeout_s
            while len(self._connections) < self._others:
                if (left := deadline - time.monotonic()) <= 0:
                    raise LostRankError(f"only {len(self._connections)} of {self._others} ranks connected")
                self._listener.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    self._connections.append(self._listener.accept()[0])
        threading.Thread(target=self._watch, daemon=True).start()

    def meet(self) -> None:
        """Wait without a time limit until every rank has arrived, as in a collective."""
        self._begun += 1
        self._liveness.count_collectives(self._begun)
        for _ in self._connections:
            self._arrived.acquire()
        for connection in self._connections:
            connection.sendall(GO)

    def interrupt(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Request a checkpoint and the end of the run. Also serves as a signal handler."""
        self._interrupted.set()

    def interrupted(self) -> bool:
        """Return whether any rank was interrupted."""
        return self._interrupted.is_set()

    def close(self, code: int) -> None:
        """Make every rank exit with `code`."""
        self._closing.set()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code]))
        # A thread of this process passes the code on. Each rank has it once the rank has disconnected.
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.settimeout(_CLOSE_S)
                while connection.recv(1):
                    pass

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(0.5):
                    self._heard(key.fileobj)  # type: ignore[arg-type]

    def _heard(self, connection: socket.socket) -> None:
        try:
            message = connection.recv(1)
        except OSError:
            message = b""
        if message == INTERRUPT:
            self._interrupted.set()
        elif message == ARRIVED:
            self._arrived.release()
        elif not self._closing.is_set():
            # As with real collectives no rank can continue. Exit at once, without waiting for the end of a step.
            print("a rank died", file=sys.stderr, flush=True)
            os._exit(1)


def follow(address: str, port: int, timeout_s: float = JOIN_TIMEOUT_S) -> int:
    """Run a rank other than 0 until rank 0 ends, and return the exit code. Rank 0 must listen within `timeout_s`."""
    connection: socket.socket | None = None
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        if connection is not None:
            connection.sendall(INTERRUPT)

    signal.signal(signal.SIGUSR1, interrupt)
    connection = socket.create_connection(("127.0.0.1", rendezvous.tunnel(address, port, timeout_s)))
    try:
        if interrupted:
            connection.sendall(INTERRUPT)
        code = _follow(connection)
    except OSError:
        code = b""
    if not code:
        print(f"rank 0 at {address}:{port} was not reached, or has died", file=sys.stderr, flush=True)
    return code[0] if code else 1


def _follow(connection: socket.socket) -> bytes:
    """Enter one collective after another, each until rank 0 answers. Return rank 0's last message."""
    heartbeat, begun = liveness(), 0
    while True:
        begun += 1
        heartbeat.enter("train")
        heartbeat.count_collectives(begun)
        connection.sendall(ARRIVED)
        if (said := connection.recv(1)) != GO:
            return said
