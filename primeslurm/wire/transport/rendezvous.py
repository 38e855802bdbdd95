"""A rendezvous of ranks that admits only processes with the run's secret. torch's own store admits any client.

    rank --> its own tunnel (127.0.0.1) ====> gate of rank 0 (the rendezvous port) --> torch's store (127.0.0.1)

A tunnel accepts connections of its own process only. Tunnel and gate prove to each other that they know the secret:
each sends random bytes and answers the other's with an HMAC of both. Then they forward bytes unchanged. Once rank 0 has
joined, the store's own port accepts only TCP segments signed with a random key of rank 0 (TCP-MD5, RFC 2385); the
kernel drops all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from primeslurm.wire.transport.loopback import LOCAL, far_socket, rows
from primeslurm.wire.transport.secret import HANDSHAKE_S, key_for

NONCE_BYTES = 32
PROOF_BYTES = 32
RECONNECT_S = 0.2  # pause between two tries to reach a gate, because ranks start before rank 0 does
# How long rank 0 waits for its port. The agent found it free, but importing torch takes a while in between.
PORT_TAKEN_S = 30.0
_READ_BYTES = 2**16
_ANY_ADDRESS = ("0.0.0.0", "::")
_TCP_MD5SIG_EXT, _TCP_MD5SIG_FLAG_PREFIX = 32, 1
_ESTABLISHED = "01"
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_tunnels: dict[tuple[str, int], int] = {}


class RendezvousError(RuntimeError):
    """Another process is connected to the store already."""


def proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    """Return the HMAC of nonces by which one end, `who`, proves that it knows `key`. Not valid for the other end."""
    return hmac.new(key, who + b"".join(nonces), hashlib.sha256).digest()


def check(shown: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(shown, expected):
        raise PermissionError("the other end does not have the run's secret")


def tunnel(host: str, port: int, patience_s: float) -> int:
    """Return the port on 127.0.0.1 of the tunnel of this process to a gate, which need not exist yet.

    A connection through the tunnel waits `patience_s` for the gate.
    """
    with _lock:
        if (host, port) not in _tunnels:
            _tunnels[host, port] = _run(_Tunnel(host, port, patience_s, _key()).open())
        return _tunnels[host, port]


def bound_store_socket() -> socket.socket:
    """Return a bound socket for torch's store to listen at, behind a gate."""
    store = socket.socket()
    store.bind(("127.0.0.1", 0))
    return store


def open_gate(host: str, port: int, store: socket.socket, gate: socket.socket | None = None) -> None:
    """Open a gate in front of a store whose only client so far is its own process.

    `gate` is a socket that already listens at the rendezvous port. Raises OSError if the port is taken, and
    RendezvousError if another process is connected to the store already.
    """
    signed = _sign(store, key := os.urandom(NONCE_BYTES))
    store_port = int(store.getsockname()[1])
    if len(_peers(store_port)) != 1:
        raise RendezvousError(
            f"another process is connected to 127.0.0.1:{store_port}, where the ranks' store has just opened"
        )
    if not signed:
        _log.warning(
            "this kernel does not sign TCP segments: users of this node reach the ranks' store at port %d", store_port
        )
    _run(_Gate(store_port, key if signed else b"", _key()).open(host, port, gate))


def _key() -> bytes:
    return key_for(b"rendezvous")


def _run(made: Awaitable[int]) -> int:
    """Run a coroutine on the event loop thread of this process's gates and tunnels. Return its result."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, name="rendezvous", daemon=True).start()

    async def started() -> int:
        return await made

    return asyncio.run_coroutine_threadsafe(started(), _loop).result(60)


def _reset_after_fork() -> None:
    # The thread does not exist in the child, and tunnels of the parent refuse it.
    global _loop, _lock
    _loop, _lock = None, threading.Lock()
    _tunnels.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


class _Tunnel:
    """Listens on 127.0.0.1 and forwards this process's connections to a gate, after proving the secret."""

    def __init__(self, host: str, port: int, patience_s: float, key: bytes) -> None:
        self._host, self._port, self._patience_s, self._key = host, port, patience_s, key

    async def open(self) -> int:
        self._server = await asyncio.start_server(_guarded(self._forward), "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        far = far_socket(peer[1], writer.get_extra_info("sockname")[1])
        if far is None or far.inode not in _own_inodes():
            _log.warning("refused a connection of another process to the ranks' store, from port %d", peer[1])
            return
        async with asyncio.timeout(self._patience_s):
            far_reader, far_writer = await self._reach()
        with contextlib.closing(far_writer):
            async with asyncio.timeout(HANDSHAKE_S):
                await self._authenticate(far_reader, far_writer)
            await _join(reader, writer, far_reader, far_writer)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection(self._host, self._port)
            except OSError:
                await asyncio.sleep(RECONNECT_S)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = os.urandom(NONCE_BYTES)
        writer.write(mine)
        theirs = await reader.readexactly(NONCE_BYTES)
        check(await reader.readexactly(PROOF_BYTES), proof(self._key, b"gate", mine, theirs))
        writer.write(proof(self._key, b"passage", theirs, mine))


class _Gate:
    """Listens at the rendezvous port and forwards peers that know the secret to torch's store."""

    def __init__(self, store_port: int, signature: bytes, key: bytes) -> None:
        self._store_port, self._signature, self._key = store_port, signature, key
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int, gate: socket.socket | None = None, taken_s: float = PORT_TAKEN_S) -> int:
        give_up = time.monotonic() + taken_s
        if gate is not None:
            self._server = await asyncio.start_server(_guarded(self._admit), sock=gate, backlog=1024)
        while self._server is None:
            try:
                self._server = await asyncio.start_server(_guarded(self._admit), host, port, backlog=1024)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                problem = f"{host}:{port}, where the ranks are to meet, is taken by {_listener(host, port)}"
                if time.monotonic() > give_up:
                    raise OSError(error.errno, problem) from None
                _log.warning("%s", problem)
                await asyncio.sleep(5 * RECONNECT_S)
        return port

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            theirs = await reader.readexactly(NONCE_BYTES)
            mine = os.urandom(NONCE_BYTES)
            writer.write(mine + proof(self._key, b"gate", theirs, mine))
            check(await reader.readexactly(PROOF_BYTES), proof(self._key, b"passage", mine, theirs))
        inner = socket.socket()
        inner.setblocking(False)
        if self._signature:
            _sign(inner, self._signature)
        await asyncio.get_running_loop().sock_connect(inner, ("127.0.0.1", self._store_port))
        far_reader, far_writer = await asyncio.open_connection(sock=inner)
        with contextlib.closing(far_writer):
            await _join(reader, writer, far_reader, far_writer)


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _guarded(serve: Connected) -> Connected:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError, PermissionError):
            await serve(reader, writer)
        writer.close()

    return connected


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    ways = [asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()


def _sign(at: socket.socket, key: bytes) -> bool:
    """Let the kernel sign all segments of a socket and drop unsigned ones. Return False if it cannot."""
    any_address = struct.pack("=HH4s120s", socket.AF_INET, 0, bytes(4), b"")
    option = any_address + struct.pack("=BBHI80s", _TCP_MD5SIG_FLAG_PREFIX, 0, len(key), 0, key)
    try:
        at.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)
    except OSError:
        return False
    return True


def _peers(port: int) -> list[str]:
    ours = f"{LOCAL[0]}:{port:04X}"
    return [row[2] for row in rows("tcp") if row[1] == ours and row[3] == _ESTABLISHED]


def _listener(host: str, port: int) -> str:
    """Return which process listens at a port, as far as this user can see it."""
    for connection in psutil.net_connections("tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr.port == port
            and connection.laddr.ip in (host, *_ANY_ADDRESS)
        ):
            with contextlib.suppress(psutil.Error):
                return (
                    f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
                    if connection.pid
                    else "another user"
                )
    return "a process that has ended since"


def _own_inodes() -> set[str]:
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(descriptor.name))
            if stat.S_ISSOCK(status.st_mode):
                inodes.add(str(status.st_ino))
    return inodes
