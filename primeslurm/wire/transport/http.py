"""HTTP clients for processes of the run and for external servers.

Agents probe their servers with the standard library instead, because they start before everything else and must be
small.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from primeslurm.wire.transport import secret

CONNECT_S = 10.0  # Timeout of a connection. Within a cluster, a server that has not accepted by then is gone.
IDLE_CONNECTIONS = 64
# Maximum size of an answer's body [bytes]. Routed experts of a million tokens in base64 are the largest: 1.4 GB.
# 131,072 tokens with 75 layers and 8 experts each take 105 MB.
LARGEST_ANSWER = 4 << 30
BUSY = (408, 425, 429)  # 4xx answers that say that the server is busy, not that the request is wrong
MOVE_POLL_S = 2.0
# Answers must not be compressed: a few bytes could decompress to any size.
UNCOMPRESSED = {"Accept-Encoding": "identity"}
_JSON = {"Content-Type": "application/json"}

T = TypeVar("T")


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
        headers=UNCOMPRESSED | dict(secret.header() if headers is None else headers),
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
        headers=UNCOMPRESSED | dict(headers),
        event_hooks={"response": [_BoundedBody.hook(LARGEST_ANSWER)]},
    )


async def post_while(
    post: Callable[..., Coroutine[Any, Any, T]],
    url: str,
    stays: Callable[[], bool],
    body: dict[str, object],
    headers: dict[str, str] | None = None,
) -> T:
    """Post JSON until `stays()` is false, because a server on a lost node never answers. Raises MovedError then."""
    content = msgspec.json.encode(body)  # ten times as fast as httpx's own encoder for a long prompt
    answer = asyncio.create_task(post(url, content=content, headers={**_JSON, **(headers or {})}))
    try:
        while not (await asyncio.wait({answer}, timeout=MOVE_POLL_S))[0]:
            if not stays():
                raise MovedError(f"{url} has moved")
        return answer.result()
    finally:
        answer.cancel()


def error_text(content: bytes) -> str:
    """Return the first 500 characters of the body of an error response."""
    return content[:2000].decode(errors="replace")[:500]


class _BoundedBody(httpx.AsyncByteStream):
    """An HTTP response's body that raises httpx.ReadError beyond a maximum size."""

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
