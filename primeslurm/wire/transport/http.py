"""HTTP clients for processes of the run and for external servers.

Agents probe their servers with the standard library instead, because they start before everything else and must be
small.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import httpx
import msgspec

from primeslurm.wire.transport import secret

CONNECT_S = 10.0  # Timeout of a connection. Within a cluster, a server that has not accepted by then is gone.
IDLE_CONNECTIONS = 64
REQUESTS_PER_CLIENT = 64  # concurrent requests of one client in `Clients`
# Maximum size of an answer's body [bytes]. Routed experts of a million tokens in base64 are the largest: 1.4 GB.
# 131,072 tokens with 75 layers and 8 experts each take 105 MB.
LARGEST_ANSWER = 4 << 30
BUSY = (408, 425, 429)  # 4xx answers that say that the server is busy, not that the request is wrong
MOVE_POLL_S = 2.0
# Answers must not be compressed: a few bytes could decompress to any size.
_UNCOMPRESSED = {"Accept-Encoding": "identity"}
_JSON = {"Content-Type": "application/json"}


class MovedError(Exception):
    """The server has another address now, or none."""


class UnavailableError(Exception):
    """The server cannot answer now, but may later."""


def internal_client(
    timeout_s: float | None,
    keep: int = IDLE_CONNECTIONS,
    headers: Mapping[str, str] | None = None,
    largest: int = LARGEST_ANSWER,
) -> httpx.AsyncClient:
    """Return a client for processes of this run: plain HTTP/1.1, no proxy, one connection per concurrent request.

    `keep` is the number of idle connections to keep; 0 for servers that close them early. An answer of more than
    `largest` bytes raises httpx.ReadError.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=keep),
        headers=_UNCOMPRESSED | dict(secret.header() if headers is None else headers),
        event_hooks={"response": [_BoundedBody.hook(largest)]},
        trust_env=False,
        verify=_no_tls(),
    )


@functools.cache
def _no_tls() -> ssl.SSLContext:
    # Plain HTTP never uses it, but each client would create its own, or even load all certificates.
    return httpx.create_ssl_context(verify=False)


def external_client(timeout_s: float, headers: Mapping[str, str]) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=IDLE_CONNECTIONS),
        headers=_UNCOMPRESSED | dict(headers),
        event_hooks={"response": [_BoundedBody.hook(LARGEST_ANSWER)]},
    )


class Clients:
    """Any number of concurrent requests at constant cost per request.

    httpcore's pool scans all its connections at the start and end of every request, which dominates with two thousand
    connections. Therefore there is one client per `at_once` requests. A request uses the first client with capacity,
    so connections are reused, and clients at the end are closed when their requests are over.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient], at_once: int = REQUESTS_PER_CLIENT) -> None:
        self._make = make
        self._at_once = at_once
        self._clients = [make()]
        self._requests = [0]
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        index = next((n for n, requests in enumerate(self._requests) if requests < self._at_once), len(self._clients))
        if index == len(self._clients):
            self._clients.append(self._make())
            self._requests.append(0)
        self._requests[index] += 1
        try:
            yield self._clients[index]
        finally:
            self._requests[index] -= 1
            self._close_idle()

    async def aclose(self) -> None:
        await asyncio.gather(*self._closing, *(client.aclose() for client in self._clients))

    def _close_idle(self) -> None:
        # The last client goes only if the one before is half idle, or the next request would create it again.
        while len(self._clients) > 1 and not self._requests[-1] and self._requests[-2] <= self._at_once // 2:
            self._requests.pop()
            task = asyncio.ensure_future(self._clients.pop().aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def post_while(
    http: httpx.AsyncClient,
    url: str,
    stays: Callable[[], bool],
    body: dict[str, object],
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """Post JSON until `stays()` is false, because a server on a lost node never answers. Raises MovedError then."""
    content = msgspec.json.encode(body)  # ten times as fast as httpx's own encoder for a long prompt
    answer = asyncio.create_task(http.post(url, content=content, headers={**_JSON, **(headers or {})}))
    try:
        while not (await asyncio.wait({answer}, timeout=MOVE_POLL_S))[0]:
            if not stays():
                raise MovedError(f"{url} has moved")
        return answer.result()
    finally:
        answer.cancel()


def error_text(answer: httpx.Response) -> str:
    """Return the first 500 characters of the body of an error response."""
    return answer.content[:2000].decode(errors="replace")[:500]


class _BoundedBody(httpx.AsyncByteStream):
    """The body of an answer, up to a maximum size."""

    def __init__(self, stream: httpx.AsyncByteStream, largest: int) -> None:
        self._stream = stream
        self._left = largest

    @classmethod
    def hook(cls, largest: int) -> Callable[[httpx.Response], Awaitable[None]]:
        async def bound(answer: httpx.Response) -> None:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise httpx.DecodingError(
                    "the answer is compressed, although no encoding was accepted", request=answer.request
                )
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            answer.stream = cls(answer.stream, largest)

        return bound

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._left -= len(chunk)
            if self._left < 0:
                raise httpx.ReadError("the answer is too long")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
