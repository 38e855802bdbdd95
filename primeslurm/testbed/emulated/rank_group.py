"""How the emulated trainer's ranks hold together: one TCP connection of each to rank 0, at the rendezvous address.

Rank 0 notices a rank that dies and fails; a rank whose rank 0 dies fails; whoever is signalled tells rank 0; and rank
0's exit code becomes everybody's. Who connects is a rank when it has shown the run's secret, and rank 0 shows it, too:

    rank 0 -> rank: random bytes
    rank -> rank 0: its own random bytes, and its proof of both
    rank 0 -> rank: its proof of both

Little but the standard library: there are hundreds of ranks, and they do nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import threading
import time
from types import FrameType

from primeslurm.records.heartbeats import liveness
from primeslurm.wire.transport.rendezvous import NONCE_BYTES, PROOF_BYTES, check, proof
from primeslurm.wire.transport.secret import HANDSHAKE_S, key_for

JOIN_TIMEOUT_S = 600.0
"""Longest wait for all ranks to be there, as torch's rendezvous has it."""
INTERRUPT = b"i"
ARRIVED = b"a"
"""What a rank says that has begun the next collective."""
GO = bytes([200])
"""What rank 0 says when all have; lower bytes are exit codes."""
RETRY_S = 0.5
BACKLOG = 1024
"""Who may have connected and not been let in yet: strangers among them."""
USE = b"emulated ranks"
"""What the secret is shown for."""


class LostRankError(Exception):
    """A rank is missing, or died."""


class Ranks:
    """Rank 0's end: accepts the others, after which it listens no more, and watches them from a thread of its own.

    Args:
        host: where to listen.
        port: the rendezvous port.
        others: how many ranks there are besides rank 0.
    """

    def __init__(self, host: str, port: int, others: int) -> None:
        self._others = others
        self._connections: list[socket.socket] = []
        self._pulse = liveness()
        self._begun = 0
        self._arrived = threading.Semaphore(0)
        self._interrupted = threading.Event()
        self._closing = threading.Event()
        self._listener = socket.create_server((host, port), backlog=BACKLOG)

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait for every rank, then watch them.

        Raises:
            LostRankError: some did not come in time.
        """
        with self._listener, _Doorkeeper(self._listener) as doorkeeper:
            deadline = time.monotonic() + timeout_s
            while len(self._connections) < self._others:
                if (left := deadline - time.monotonic()) <= 0:
                    raise LostRankError(f"only {len(self._connections)} of {self._others} ranks came")
                self._connections += doorkeeper.admitted(left)
        threading.Thread(target=self._watch, daemon=True).start()

    def meet(self) -> None:
        """Wait until every rank has come, as in a collective: for as long as it takes."""
        self._begun += 1
        self._pulse.count_collectives(self._begun)
        for _ in self._connections:
            self._arrived.acquire()
        for connection in self._connections:
            connection.sendall(GO)

    def interrupt(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask for a checkpoint and the end; also a signal handler."""
        self._interrupted.set()

    def interrupted(self) -> bool:
        """Whether any rank was asked to checkpoint and stop."""
        return self._interrupted.is_set()

    def close(self, code: int) -> None:
        """Have every rank exit with `code`."""
        self._closing.set()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code]))
                connection.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select(0.5):
                    self._heard(key.fileobj)  # type: ignore[arg-type]

    def _heard(self, connection: socket.socket) -> None:
        try:
            said = connection.recv(1)
        except OSError:
            said = b""
        if said == INTERRUPT:
            self._interrupted.set()
        elif said == ARRIVED:
            self._arrived.release()
        elif not self._closing.is_set():
            # as with real collectives: nobody can go on, and the process must not wait for a step to end
            print("a rank is gone", file=sys.stderr, flush=True)
            os._exit(1)


class _Doorkeeper:
    """Lets those in who show the run's secret, whatever others do meanwhile.

    Args:
        listener: where they come.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._key = key_for(USE)
        self._waiting: dict[socket.socket, tuple[float, bytes]] = {}
        """Since when, and the random bytes that were sent."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Doorkeeper:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for connection in self._waiting:
            connection.close()

    def admitted(self, timeout_s: float) -> list[socket.socket]:
        """Wait for somebody to say something; returns those who have shown the secret then."""
        found, somebody_new = [], False
        for key, _ in self._selector.select(min(timeout_s, RETRY_S)):
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            if connection is self._listener:
                somebody_new = True
            elif self._shows(connection):
                found.append(connection)
        if somebody_new:  # when those who speak have been heard: silent ones may be turned away for it
            self._greet()
        late = time.monotonic() - HANDSHAKE_S
        for connection in [each for each, (since, _) in self._waiting.items() if since < late]:
            self._turn_away(connection)
        return found

    def _greet(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._waiting:
                self._turn_away(next(iter(self._waiting)))  # the oldest, who had the longest to speak
            else:  # gone again, for one
                time.sleep(0.01)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, NONCE_BYTES + PROOF_BYTES)
        self._waiting[connection] = time.monotonic(), (nonce := os.urandom(NONCE_BYTES))
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            connection.sendall(nonce)

    def _shows(self, connection: socket.socket) -> bool:
        mine = self._part(connection)
        try:
            said = connection.recv(NONCE_BYTES + PROOF_BYTES)
            theirs = said[:NONCE_BYTES]
            check(said[NONCE_BYTES:], proof(self._key, b"rank", mine, theirs))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            connection.setblocking(True)
            connection.sendall(proof(self._key, b"rank 0", theirs, mine))
        except OSError:  # a PermissionError is one, too
            connection.close()
            return False
        return True

    def _turn_away(self, connection: socket.socket) -> None:
        self._part(connection)
        connection.close()

    def _part(self, connection: socket.socket) -> bytes:
        self._selector.unregister(connection)
        return self._waiting.pop(connection)[1]


def follow(address: str, port: int, timeout_s: float = JOIN_TIMEOUT_S) -> int:
    """Do what a rank other than 0 does: be there until rank 0 ends.

    Args:
        address: of rank 0.
        port: the rendezvous port.
        timeout_s: longest wait for rank 0 to listen.

    Returns:
        The exit code.

    Raises:
        LostRankError: rank 0 did not listen in time.
    """
    connection: socket.socket | None = None
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if connection is not None:
            connection.sendall(INTERRUPT)

    signal.signal(signal.SIGUSR1, interrupt)
    connection = _connect(address, port, timeout_s)
    if asked:
        connection.sendall(INTERRUPT)
    try:
        said = _follow(connection)
    except OSError:
        said = b""
    return said[0] if said else 1


def _follow(connection: socket.socket) -> bytes:
    """Begin one collective after the other, and wait in each for rank 0; returns what it says at the end."""
    own, begun = liveness(), 0
    while True:
        begun += 1
        own.enter("train")
        own.count_collectives(begun)
        connection.sendall(ARRIVED)
        if (said := connection.recv(1)) != GO:
            return said


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    key, deadline = key_for(USE), time.monotonic() + timeout_s
    while True:  # and not `wire.transport.retry`, whose tenacity would be a fifth of a rank's memory
        try:
            return _entered(socket.create_connection((address, port), timeout=5), key, timeout_s)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostRankError(f"rank 0 is not at {address}:{port}: {error}") from error
            time.sleep(RETRY_S)


def _entered(connection: socket.socket, key: bytes, timeout_s: float) -> socket.socket:
    try:
        connection.settimeout(timeout_s)  # rank 0 listens before it lets anybody in
        theirs, mine = _exactly(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
        connection.sendall(mine + proof(key, b"rank", theirs, mine))
        check(_exactly(connection, PROOF_BYTES), proof(key, b"rank 0", mine, theirs))
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        if not (part := connection.recv(size - len(said))):
            raise ConnectionError("it hung up before it had shown the run's secret")
        said += part
    return said
