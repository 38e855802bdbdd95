"""A minimal HTTP/1.1 server for ASGI applications, on asyncio alone.

An emulated deployment starts hundreds of servers on a few cores, and importing a full server would cost each of them
more than all its requests. It supports the requests of our clients and of vllm-router: bodies with a Content-Length.
"""

from __future__ import annotations

import asyncio
import json
import re

from primeslurm.inference.auth import App, Message, Receive, Scope, Send

Headers = list[tuple[bytes, bytes]]
MAX_HEAD_BYTES = 65536
# Longest request body. A prompt of a million tokens has 8 MB.
MAX_BODY_BYTES = 64 << 20
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    413: "Content Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
}


async def start(app: App, host: str, port: int) -> asyncio.Server:
    """Start to serve an ASGI application. Raise OSError if the port is taken."""
    return await asyncio.get_running_loop().create_server(lambda: _Connection(app), host, port, backlog=512)


async def answer(send: Send, status: int, content: object) -> None:
    """Send a JSON response; plain text if `content` is a string."""
    plain = isinstance(content, str)
    body = str(content).encode() if plain else json.dumps(content).encode()
    kind = b"text/plain; version=0.0.4" if plain else b"application/json"
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})


class _Connection(asyncio.Protocol):
    """One client connection. A disconnect cancels the pending request, as in vLLM."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next()
        elif len(self._buffer) > MAX_HEAD_BYTES + MAX_BODY_BYTES:  # a client that pipelines without reading responses
            self._transport.close()

    def _next(self) -> None:
        """Start the next request if it has arrived completely."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self._transport.close()
            return
        head = _head(bytes(self._buffer[: min(end, MAX_HEAD_BYTES)]))
        if head is None or end > MAX_HEAD_BYTES:
            self._refuse(400, "not an HTTP request")
            return
        scope, length = head
        if length > MAX_BODY_BYTES:
            self._refuse(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        scope["server"] = self._transport.get_extra_info("sockname")
        fields = dict(scope["headers"])
        keep = fields.get(b"connection", b"").lower() != b"close"
        unsupported = b"transfer-encoding" in fields
        self._task = asyncio.create_task(self._respond(_chunked if unsupported else self._app, scope, body, keep))

    def _refuse(self, status: int, why: str) -> None:
        """Send an error and close the connection, because the next request cannot be located in the stream."""
        self._buffer.clear()
        self._write(status, [], _error(why), keep=False)

    async def _respond(self, app: App, scope: Scope, body: bytes, keep: bool) -> None:
        status, headers, sent = 500, Headers(), b""

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers, sent
            if message["type"] == "http.response.start":
                status, headers = message["status"], message["headers"]
            else:
                sent += message["body"]

        try:
            await app(scope, receive, send)
        except Exception as error:
            status, headers, sent = 500, [], _error(repr(error)[:500])
        self._write(status, headers, sent, keep)
        self._task = None
        if keep and not self._transport.is_closing():
            self._next()

    def _write(self, status: int, headers: Headers, body: bytes, keep: bool) -> None:
        head = [f"HTTP/1.1 {status} {_REASONS.get(status, '-')}".encode()]
        head += [name + b": " + value for name, value in headers if name != b"content-length"]
        head.append(b"content-length: %d" % len(body))
        if not keep:
            head.append(b"connection: close")
        self._transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        if not keep:
            self._transport.close()


def _error(why: str) -> bytes:
    return json.dumps({"error": why}).encode()


def _head(raw: bytes) -> tuple[Scope, int] | None:
    """Return the ASGI scope of a request and the length of its body [bytes]; None if it is invalid."""
    request, *lines = raw.split(b"\r\n")
    parts = request.decode("latin-1").split(" ")
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    length = dict(headers).get(b"content-length", b"0")
    if len(parts) != 3 or not parts[1].startswith("/") or not re.fullmatch(rb"[0-9]{1,18}", length):
        return None
    path, _, query = parts[1].partition("?")
    kind = {"type": "http", "method": parts[0], "path": path, "query_string": query.encode(), "headers": headers}
    return kind, int(length)


async def _chunked(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, 501, {"error": "only bodies with a Content-Length are supported"})
