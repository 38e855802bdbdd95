"""The HTTP endpoint of a router's supervisor.

The node agent, which has no token, asks it for the router's health. The router asks it whether a client's token is
valid, at a random path, so that strangers cannot test tokens. It serves only GET, one request per connection, and
reveals nothing but whether the router is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable

# Longest request head. The router accepts less (about 400 KiB), so every token that it asks about is counted.
MAX_HEAD_BYTES = 2**19
# Time in which a client must send its request [s].
HEAD_S = 5.0
_log = logging.getLogger(__name__)


class RouterHealthEndpoint:
    """Answers health requests of the node agent and token checks of the router.

    `request` requests a path from the router and returns the HTTP status (None: no answer). `complete` returns whether
    the router has all its workers.
    """

    def __init__(
        self, secret: str, request: Callable[[str], Awaitable[int | None]], complete: Callable[[], bool]
    ) -> None:
        self._expected = f"Bearer {secret}".encode()
        self._request = request
        self._complete = complete
        self.token_path = f"/key/{secrets.token_urlsafe()}"  # Path of token checks, known only to the router
        self.refused_bytes = 0  # Total length of invalid tokens. The router caches each of them without limit.

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD_BYTES)

    async def status(self, path: str, token: bytes) -> int | None:
        """Return the HTTP status for a request of `path` with bearer `token`; None: close without a response."""
        if hmac.compare_digest(path.encode(), self.token_path.encode()):
            return self._judge(token)
        if path not in ("/liveness", "/health"):
            return 404
        status = await self._request(path)
        return 503 if status == 200 and path == "/health" and not self._complete() else status

    def _judge(self, token: bytes) -> int:
        if hmac.compare_digest(token, self._expected):
            return 200
        self.refused_bytes += len(token) + 100
        return 401

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
            path, token = _parse(head)
            status = await self.status(path, token)
            if status is not None:
                writer.write(b"HTTP/1.1 %d -\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
                await writer.drain()
        writer.close()


def _parse(head: bytes) -> tuple[str, bytes]:
    """Return the path and the Authorization header of a GET request; an empty path for other methods."""
    request, *lines = head.split(b"\r\n")
    method, _, rest = request.partition(b" ")
    token = b""
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"authorization":
            token = value.strip()
    return (rest.partition(b" ")[0].decode("latin-1") if method == b"GET" else ""), token
