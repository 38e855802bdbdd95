"""Carries connections between the node's loopback and that of a sandbox, which is a network of its own.

Only the sockets are of the other network: this process connects, listens and copies bytes on both sides.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from primeslurm.wire.transport.loopback import far_socket

CONNECTIONS = 64
"""At once, of one sandbox: each takes two of the worker's file descriptors."""


class SandboxGoneError(RuntimeError):
    """The sandbox does not answer any more: ended, killed from within, or for what it used."""


class PrivateLoopback:
    """A runtime with a loopback that is not the node's: which of the node's ports are to be reached from within."""

    _ports: set[int]

    def host_url(self, url: str) -> str:
        """Open the way to an endpoint on the node's loopback; within, it has the same address."""
        parts = urlsplit(url)
        if parts.hostname in ("127.0.0.1", "localhost") and parts.port is not None:
            self._ports.add(parts.port)
        return url


class PortForwarder:
    """The ways into and out of one sandbox.

    Args:
        inner: makes a TCP socket of the sandbox's network, which listens on a port of its loopback or, without a port,
            is not connected yet. Raises SandboxGoneError.
    """

    def __init__(self, inner: Callable[[int | None], Awaitable[socket.socket]]) -> None:
        self._inner = inner
        self._forwarded: set[int] = set()
        self._servers: list[asyncio.Server] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def forward(self, port: int) -> None:
        """Let programs within reach a port of the node's loopback, under the same number. Raises SandboxGoneError."""
        if port in self._forwarded:
            return
        self._forwarded.add(port)
        listener = await self._inner(port)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._join(reader, writer, asyncio.open_connection("127.0.0.1", port))

        self._servers.append(await asyncio.start_server(connected, sock=listener))

    async def expose(self, port: int) -> int:
        """Let this user's processes of the node reach a port within. Returns the port on the node's loopback."""

        async def inner() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            plug = await self._inner(None)
            await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", port))
            return await asyncio.open_connection(sock=plug)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if _is_own(writer):  # a tool server asks nobody who he is
                await self._join(reader, writer, inner())
            else:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: Any) -> None:
        """Carry bytes both ways until both sides have ended."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._pumps) >= CONNECTIONS:
            other.close()
            writer.close()
            return
        self._pumps.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await other
            writers.append(far_writer)
            await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
        except (OSError, SandboxGoneError):
            pass
        finally:
            self._pumps.discard(task)
            for each in writers:
                each.close()

    def close(self) -> None:
        """End all connections, and listen no more."""
        for server in self._servers:
            server.close()
        for task in list(self._pumps):
            task.cancel()


def _is_own(connection: asyncio.StreamWriter) -> bool:
    """Whether a process of this user made a connection to the node's loopback."""
    far = far_socket(connection.get_extra_info("peername")[1], connection.get_extra_info("sockname")[1])
    return far is not None and far.uid == os.geteuid()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
