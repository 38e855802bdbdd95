"""Connections between the node's loopback and that of a sandbox with a network of its own.

The sandbox only supplies sockets of its network. The worker connects, listens and copies bytes on both sides.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from primeslurm.wire.transport.loopback import far_socket

# Open connections of one sandbox. Each needs two file descriptors of the worker.
MAX_CONNECTIONS = 64


class SandboxGoneError(RuntimeError):
    """The sandbox does not answer: it ended, a program inside killed it, or it used too much."""


class PrivateLoopback:
    """Mixin of runtimes whose loopback is not the node's. It notes which ports of the node they must reach."""

    _ports: set[int]

    def host_url(self, url: str) -> str:
        """Make an endpoint on the node's loopback reachable inside. Its address stays the same."""
        parts = urlsplit(url)
        if parts.hostname in ("127.0.0.1", "localhost") and parts.port is not None:
            self._ports.add(parts.port)
        return url


class PortForwarder:
    """Forwards ports into and out of one sandbox.

    Args:
        make_socket: creates a TCP socket in the sandbox's network. With a port, the socket listens there on loopback;
            with None, it is not connected. Raises SandboxGoneError.
    """

    def __init__(self, make_socket: Callable[[int | None], Awaitable[socket.socket]]) -> None:
        self._make_socket = make_socket
        self._forwarded: set[int] = set()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def forward(self, port: int) -> None:
        """Make a port of the node's loopback reachable inside, under the same number. Raises SandboxGoneError."""
        if port in self._forwarded:
            return
        self._forwarded.add(port)  # before the first await: a second call must not listen again
        listener = await self._make_socket(port)

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._join(reader, writer, asyncio.open_connection("127.0.0.1", port))

        self._servers.append(await asyncio.start_server(on_connection, sock=listener))

    async def expose(self, port: int) -> int:
        """Make a port inside reachable for this user on the node. Return the port on the node's loopback."""

        async def connect_inside() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            plug = await self._make_socket(None)
            await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", port))
            return await asyncio.open_connection(sock=plug)

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Tool servers do not authenticate their clients, so other users of the node must not get through.
            if _is_from_this_user(writer):
                await self._join(reader, writer, connect_inside())
            else:
                writer.close()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other_side: Any) -> None:
        """Copy bytes both ways until both sides have ended."""
        task = asyncio.current_task()
        assert task is not None
        # A program inside could open connections until the worker has no file descriptors left.
        if len(self._connections) >= MAX_CONNECTIONS:
            other_side.close()
            writer.close()
            return
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await other_side
            writers.append(far_writer)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except (OSError, SandboxGoneError):
            pass
        finally:
            self._connections.discard(task)
            for each in writers:
                each.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()


def _is_from_this_user(connection: asyncio.StreamWriter) -> bool:
    far = far_socket(connection.get_extra_info("peername")[1], connection.get_extra_info("sockname")[1])
    return far is not None and far.uid == os.geteuid()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    # Pass on the end of one direction only: HTTP clients may close theirs and still read the response.
    if writer.can_write_eof():
        writer.write_eof()
