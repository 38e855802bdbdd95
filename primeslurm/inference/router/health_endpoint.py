"""What the keeper of a router answers: its agent, which has no secret to show, and the router, which asks about tokens.

It serves GET alone, one request a connection: whoever reaches its port learns whether a router is up, and nothing else.
Where the router asks about tokens is a path that nobody else can guess, or strangers could ask in its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable

MAX_HEAD_BYTES = 2**19
"""More than the router takes (about 400 KiB), so that every token that it asks about is counted."""
HEAD_S = 5.0
"""Who has not sent a request after so long is not listened to any more."""
_log = logging.getLogger(__name__)


class RouterHealthEndpoint:
    """The server.

    Args:
        secret: the run's.
        look: asks the router for a path, and returns its HTTP status; None without an answer.
        complete: whether the router has all its workers.
    """

    def __init__(self, secret: str, look: Callable[[str], Awaitable[int | None]], complete: Callable[[], bool]) -> None:
        self._expected = f"Bearer {secret}".encode()
        self._look = look
        self._complete = complete
        self.keys = f"/key/{secrets.token_urlsafe()}"
        """Path at which tokens are judged. Only the router is told."""
        self.refused_bytes = 0
        """How long the tokens were, together, that were no good. The router remembers each of them for ever."""

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Listen. Raises OSError."""
        return await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD_BYTES)

    async def status(self, path: str, token: bytes) -> int | None:
        """Judge one request; None: it gets no answer, as if nobody listened."""
        if hmac.compare_digest(path.encode(), self.keys.encode()):
            return self._judge(token)
        if path not in ("/liveness", "/health"):
            return 404
        found = await self._look(path)
        return 503 if found == 200 and path == "/health" and not self._complete() else found

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
    """Read the path of a GET, and its Authorization header. Nothing fits a path that is empty."""
    request, *lines = head.split(b"\r\n")
    method, _, rest = request.partition(b" ")
    token = b""
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"authorization":
            token = value.strip()
    return (rest.partition(b" ")[0].decode("latin-1") if method == b"GET" else ""), token
