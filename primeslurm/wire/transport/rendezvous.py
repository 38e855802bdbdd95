"""Where ranks meet, for those alone who have the run's secret. torch's store lets everybody in who reaches its port.

    rank --> its own passage (127.0.0.1) ====> gate of rank 0 (the rendezvous port) --> torch's store (127.0.0.1)

A passage takes connections of its own process only. Passage and gate show one another that they have the secret (HMAC
of each other's random bytes); then bytes go to and fro as they are. Once rank 0 has joined, the store's own port takes
only segments that are signed with a key that rank 0 has made up (TCP-MD5, RFC 2385): its kernel drops all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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

from primeslurm.wire.transport.handshake import NONCE_BYTES, PROOF_BYTES, check, key_for, proof
from primeslurm.wire.transport.loopback import LOCAL, far_socket, rows
from primeslurm.wire.transport.secret import HANDSHAKE_S

KNOCK_S = 0.2
"""Between two tries to reach a gate: ranks come before rank 0 does."""
TAKEN_S = 30.0
"""How long rank 0 waits for its port, which was free when its agent looked: it imports torch in between."""
_CHUNK = 2**16
_ANY = ("0.0.0.0", "::")
_TCP_MD5SIG_EXT, _TCP_MD5SIG_FLAG_PREFIX = 32, 1
_ESTABLISHED = "01"
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_passages: dict[tuple[str, int], int] = {}


class RendezvousError(RuntimeError):
    """Somebody else was there first."""


def passage(host: str, port: int, patience_s: float) -> int:
    """Open a way to a gate, for this process alone; one that is open already is given again.

    Args:
        host: where the gate is, or will be.
        port: of the gate.
        patience_s: for how long a connection through it waits for the gate.

    Returns:
        The port at 127.0.0.1.
    """
    with _lock:
        if (host, port) not in _passages:
            way = _Passage(host, port, patience_s, _key())
            _passages[host, port] = _run(way.open())
        return _passages[host, port]


def reserve() -> socket.socket:
    """Bind the socket that torch's store is to listen at; `open_gate` leads there."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


def open_gate(host: str, port: int, store: socket.socket, gate: socket.socket | None = None) -> None:
    """Let those in who have the secret, to a store that listens and has its own process as its only client.

    Args:
        host: where to listen.
        port: the rendezvous port.
        store: the store's listening socket.
        gate: one that listens there already.

    Raises:
        OSError: the port is taken.
        RendezvousError: somebody else is connected to the store already.
    """
    signed = _sign(store, key := os.urandom(NONCE_BYTES))
    place = int(store.getsockname()[1])
    if len(_peers(place)) != 1:
        raise RendezvousError(
            f"somebody else is connected to 127.0.0.1:{place}, where the ranks' store has just opened"
        )
    if not signed:
        _log.warning(
            "this kernel does not sign TCP segments: users of this node reach the ranks' store at port %d", place
        )
    _run(_Gate(place, key if signed else b"", _key()).open(host, port, gate))


def _key() -> bytes:
    return key_for(b"rendezvous")


def _run(made: Awaitable[int]) -> int:
    """Run a coroutine on the thread that all gates and passages of this process share."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, name="rendezvous", daemon=True).start()

    async def started() -> int:
        return await made

    return asyncio.run_coroutine_threadsafe(started(), _loop).result(60)


def _leave_behind() -> None:
    """In a process that was forked: the thread is not there, and ways of its parent refuse it."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()
    _passages.clear()


os.register_at_fork(after_in_child=_leave_behind)


class _Passage:
    """This process's way to a gate."""

    def __init__(self, host: str, port: int, patience_s: float, key: bytes) -> None:
        self._host, self._port, self._patience_s, self._key = host, port, patience_s, key

    async def open(self) -> int:
        self._server = await asyncio.start_server(_guarded(self._lead), "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        far = far_socket(peer[1], writer.get_extra_info("sockname")[1])
        if far is None or far.inode not in _own_inodes():
            _log.warning("refused a connection of another process to the ranks' store, from port %d", peer[1])
            return
        async with asyncio.timeout(self._patience_s):
            far_reader, far_writer = await self._reach()
        with contextlib.closing(far_writer):
            async with asyncio.timeout(HANDSHAKE_S):
                await self._show(far_reader, far_writer)
            await _join(reader, writer, far_reader, far_writer)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection(self._host, self._port)
            except OSError:
                await asyncio.sleep(KNOCK_S)

    async def _show(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = os.urandom(NONCE_BYTES)
        writer.write(mine)
        theirs = await reader.readexactly(NONCE_BYTES)
        check(await reader.readexactly(PROOF_BYTES), proof(self._key, b"gate", mine, theirs))
        writer.write(proof(self._key, b"passage", theirs, mine))


class _Gate:
    """What listens at the rendezvous port."""

    def __init__(self, place: int, signature: bytes, key: bytes) -> None:
        self._place, self._signature, self._key = place, signature, key
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int, gate: socket.socket | None = None, taken_s: float = TAKEN_S) -> int:
        give_up = time.monotonic() + taken_s
        if gate is not None:
            self._server = await asyncio.start_server(_guarded(self._admit), sock=gate, backlog=1024)
        while self._server is None:
            try:
                self._server = await asyncio.start_server(_guarded(self._admit), host, port, backlog=1024)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                found = f"{host}:{port}, where the ranks are to meet, is taken by {_listener(host, port)}"
                if time.monotonic() > give_up:
                    raise OSError(error.errno, found) from None
                _log.warning("%s", found)
                await asyncio.sleep(5 * KNOCK_S)
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
        await asyncio.get_running_loop().sock_connect(inner, ("127.0.0.1", self._place))
        far_reader, far_writer = await asyncio.open_connection(sock=inner)
        with contextlib.closing(far_writer):
            await _join(reader, writer, far_reader, far_writer)


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _guarded(serve: Connected) -> Connected:
    """Whatever a peer does costs it its connection, and nobody anything else."""

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
    """Hand on in both directions, until either end closes."""
    ways = [asyncio.create_task(_hand_on(reader, far_writer)), asyncio.create_task(_hand_on(far_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()


def _sign(at: socket.socket, key: bytes) -> bool:
    """Have the kernel sign every segment to any IPv4 address, and drop those that are not. False: it cannot."""
    everybody = struct.pack("=HH4s120s", socket.AF_INET, 0, bytes(4), b"")
    option = everybody + struct.pack("=BBHI80s", _TCP_MD5SIG_FLAG_PREFIX, 0, len(key), 0, key)
    try:
        at.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)
    except OSError:
        return False
    return True


def _peers(port: int) -> list[str]:
    """List the remote ends of what is connected to a port of this machine."""
    ours = f"{LOCAL[0]}:{port:04X}"
    return [row[2] for row in rows("tcp") if row[1] == ours and row[3] == _ESTABLISHED]


def _listener(host: str, port: int) -> str:
    """Say who listens at a port, as far as this user may know."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.laddr.ip in (host, *_ANY):
            with contextlib.suppress(psutil.Error):
                return f"process {found.pid} ({psutil.Process(found.pid).name()})" if found.pid else "another user"
    return "nobody any more"


def _own_inodes() -> set[str]:
    """List the sockets of this process."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inode = os.fstat(int(descriptor.name))
            if stat.S_ISSOCK(inode.st_mode):
                found.add(str(inode.st_ino))
    return found
