"""HTTP clients: those that stay within a run, and those that leave it.

Agents probe their servers with the standard library instead: they live beside engines and start before everything else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import httpx

from primeslurm.wire import secret

CONNECT_S = 10.0
"""Within a cluster, who has not taken a connection for this long will not."""
KEPT = 64
"""Idle connections that a client of many requests keeps."""
LARGEST_ANSWER = 4 << 30
"""Bytes of the body of an answer. The largest has the routed experts of a million tokens, in base64: 1.4 GB; those of
131,072 tokens of 75 layers and 8 experts each are 105 MB."""
_PLAIN = {"Accept-Encoding": "identity"}
"""Compressed, a few bytes could become any number of them."""


def client_within_run(
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
        verify=False,  # plain HTTP: every client would load all certificates of the machine
    )


def client_out_of_run(timeout_s: float, headers: Mapping[str, str]) -> httpx.AsyncClient:
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
