"""Connects the emulated trainer's ranks: each rank has one TCP connection to rank 0, at the rendezvous address.

Rank 0 fails if another rank dies, and the others fail if rank 0 dies. A rank that gets SIGUSR1 tells rank 0. All ranks
exit with rank 0's exit code. Both sides prove that they have the run's secret:

    rank 0 -> rank: random bytes
    rank -> rank 0: its own random bytes, and its proof of both
    rank 0 -> rank: its proof of both

The module imports little beyond the standard library, because hundreds of ranks run nothing else.
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

# Longest wait for all ranks [s], as in torch's rendezvous.
JOIN_TIMEOUT_S = 600.0
INTERRUPT = b"i"
# Message of a rank that has reached the next collective.
ARRIVED = b"a"
# Message of rank 0 when all ranks have arrived. Lower bytes are exit codes.
GO = bytes([200])
RETRY_S = 0.5
# Limit of unauthenticated connections, which may include strangers.
BACKLOG = 1024
# Purpose of the key that is derived from the run's secret.
USE = b"emulated ranks"


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
        self._listener = socket.create_server((host, port), backlog=BACKLOG)

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait for all ranks, then watch them. Raise LostRankError after `timeout_s`."""
        with self._listener, _Authenticator(self._listener) as authenticator:
            deadline = time.monotonic() + timeout_s
            while len(self._connections) < self._others:
                if (left := deadline - time.monotonic()) <= 0:
                    raise LostRankError(f"only {len(self._connections)} of {self._others} ranks connected")
                self._connections += authenticator.accepted(left)
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


class _Authenticator:
    """Accepts connections that prove the run's secret, without being blocked by others that do not."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._key = key_for(USE)
        self._waiting: dict[socket.socket, tuple[float, bytes]] = {}
        """Time of the connection, and the random bytes that were sent."""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> _Authenticator:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for connection in self._waiting:
            connection.close()

    def accepted(self, timeout_s: float) -> list[socket.socket]:
        """Wait for messages, and return the connections that have proved the secret with them."""
        authenticated, has_new = [], False
        for key, _ in self._selector.select(min(timeout_s, RETRY_S)):
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            if connection is self._listener:
                has_new = True
            elif self._shows(connection):
                authenticated.append(connection)
        if has_new:  # after reading all messages, because a full file table makes `_greet` drop waiting connections
            self._greet()
        late = time.monotonic() - HANDSHAKE_S
        for connection in [each for each, (since, _) in self._waiting.items() if since < late]:
            self._drop(connection)
        return authenticated

    def _greet(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._waiting:
                self._drop(next(iter(self._waiting)))  # the one that has waited longest
            else:  # for example, the client has disconnected already
                time.sleep(0.01)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, NONCE_BYTES + PROOF_BYTES)
        self._waiting[connection] = time.monotonic(), (nonce := os.urandom(NONCE_BYTES))
        self._selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            connection.sendall(nonce)

    def _shows(self, connection: socket.socket) -> bool:
        mine = self._remove(connection)
        try:
            message = connection.recv(NONCE_BYTES + PROOF_BYTES)
            theirs = message[:NONCE_BYTES]
            check(message[NONCE_BYTES:], proof(self._key, b"rank", mine, theirs))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            connection.setblocking(True)
            connection.sendall(proof(self._key, b"rank 0", theirs, mine))
        except OSError:  # includes the PermissionError of `check`
            connection.close()
            return False
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._remove(connection)
        connection.close()

    def _remove(self, connection: socket.socket) -> bytes:
        self._selector.unregister(connection)
        return self._waiting.pop(connection)[1]


def follow(address: str, port: int, timeout_s: float = JOIN_TIMEOUT_S) -> int:
    """Run a rank other than 0 until rank 0 ends, and return the exit code.

    Raises:
        LostRankError: rank 0 did not listen within `timeout_s`.
    """
    connection: socket.socket | None = None
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        if connection is not None:
            connection.sendall(INTERRUPT)

    signal.signal(signal.SIGUSR1, interrupt)
    connection = _connect(address, port, timeout_s)
    if interrupted:
        connection.sendall(INTERRUPT)
    try:
        code = _follow(connection)
    except OSError:
        code = b""
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


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    key, deadline = key_for(USE), time.monotonic() + timeout_s
    while True:  # not `wire.transport.retry`, because tenacity would add a fifth to a rank's memory
        try:
            return _entered(socket.create_connection((address, port), timeout=5), key, timeout_s)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostRankError(f"rank 0 is not at {address}:{port}: {error}") from error
            time.sleep(RETRY_S)


def _entered(connection: socket.socket, key: bytes, timeout_s: float) -> socket.socket:
    try:
        connection.settimeout(timeout_s)  # rank 0 listens before it starts to accept ranks
        theirs, mine = _exactly(connection, NONCE_BYTES), os.urandom(NONCE_BYTES)
        connection.sendall(mine + proof(key, b"rank", theirs, mine))
        check(_exactly(connection, PROOF_BYTES), proof(key, b"rank 0", mine, theirs))
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    message = b""
    while len(message) < size:
        if not (chunk := connection.recv(size - len(message))):
            raise ConnectionError("rank 0 closed the connection before it had proved the run's secret")
        message += chunk
    return message
