"""HTTP clients: those that stay within a run, and those that leave it.

Agents probe their servers with the standard library instead: they live beside engines and start before everything else.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import httpx

from primeslurm.wire.transport import secret

CONNECT_S = 10.0
"""Within a cluster, who has not taken a connection for this long will not."""
KEPT = 64
"""Idle connections that a client of many requests keeps."""
AT_ONCE = 64
"""Requests that a client has at once where there may be thousands."""
LARGEST_ANSWER = 4 << 30
"""Bytes of the body of an answer. The largest has the routed experts of a million tokens, in base64: 1.4 GB; those of
131,072 tokens of 75 layers and 8 experts each are 105 MB."""
_PLAIN = {"Accept-Encoding": "identity"}
"""Compressed, a few bytes could become any number of them."""


def internal_client(
    timeout_s: float | None,
    keep: int = KEPT,
    headers: Mapping[str, str] | None = None,
    largest: int = LARGEST_ANSWER,
) -> httpx.AsyncClient:
    """A client for processes of this run: plain HTTP/1.1, past any proxy, as many connections as there are requests.

    Args:
        timeout_s: for an answer; None: as long as it takes.
        keep: idle connections kept; 0 for servers that close them sooner than the next request comes.
        headers: instead of the run's secret.
        largest: an answer of more bytes is none (httpx.ReadError).
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=keep),
        headers=_PLAIN | dict(secret.header() if headers is None else headers),
        event_hooks={"response": [_Bounded.by(largest)]},
        trust_env=False,
        verify=_no_tls(),
    )


@functools.cache
def _no_tls() -> ssl.SSLContext:
    """What a client of plain HTTP never uses: each would make its own, in a millisecond, or load all certificates."""
    return httpx.create_ssl_context(verify=False)


class Clients:
    """As many requests at once as there are, each at the same cost.

    A client looks at all of its connections whenever a request begins and ends (httpcore's pool): with two thousand
    that is most of what a request costs. So there is another one for every `AT_ONCE` requests. The first that has room
    is taken, so that kept connections are used again; those at the end are closed once their requests are over.

    Args:
        make: a client.
        at_once: requests of each.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient], at_once: int = AT_ONCE) -> None:
        self._make = make
        self._at_once = at_once
        self._clients = [make()]
        self._requests = [0]
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """Lend a client for one request."""
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
        """Close all connections."""
        await asyncio.gather(*self._closing, *(client.aclose() for client in self._clients))

    def _close_idle(self) -> None:
        """Do without the last one while the one before is half empty, too: the next request would not make it anew."""
        while len(self._clients) > 1 and not self._requests[-1] and self._requests[-2] <= self._at_once // 2:
            self._requests.pop()
            task = asyncio.ensure_future(self._clients.pop().aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def external_client(timeout_s: float, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client for a server that is no part of the run: through the site's proxy, and certificates are verified."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT),
        headers=_PLAIN | dict(headers),
        event_hooks={"response": [_Bounded.by(LARGEST_ANSWER)]},
    )


def words(answer: httpx.Response) -> str:
    """Read what an answer says, as much as an error message has room for, whatever it claims to be written in."""
    return answer.content[:2000].decode(errors="replace")[:500]


class _Bounded(httpx.AsyncByteStream):
    """The body of an answer, up to a bound."""

    def __init__(self, stream: httpx.AsyncByteStream, largest: int) -> None:
        self._stream = stream
        self._left = largest

    @classmethod
    def by(cls, largest: int) -> Callable[[httpx.Response], Awaitable[None]]:
        """A hook that bounds the answers of a client."""

        async def bound(answer: httpx.Response) -> None:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise httpx.DecodingError("the answer is compressed, which nobody asked for", request=answer.request)
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
        """Close the connection, or give it back."""
        await self._stream.aclose()
