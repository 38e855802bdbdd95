"""The HTTP connection of an environment worker to its router.

It uses aiohttp, because a request with httpx takes ten times as much CPU time: half of a single-turn rollout's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import aiohttp

from primeslurm.wire.transport import secret
from primeslurm.wire.transport.http import CONNECT_S, LARGEST_ANSWER, UNCOMPRESSED

IDLE_S = 5.0  # Idle connections are closed after this time. Servers of uvicorn close theirs then, too.


class RouterAnswer(NamedTuple):
    """The answer to a request, read completely."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class RouterSession:
    """Any number of concurrent requests to one router, with the run's secret and one connection each."""

    def __init__(self, timeout_s: float, largest: int = LARGEST_ANSWER) -> None:
        # A limit of the whole request. `sock_read` bounds neither sending nor an answer with a damaged later chunk.
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S)
        self._largest = largest
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, content: bytes, headers: Mapping[str, str]) -> RouterAnswer:
        """Post a body.

        Raise aiohttp.ClientError if there is no answer, or if it is compressed or too long, and TimeoutError if it is
        not complete in time.
        """
        if self._session is None:  # it belongs to the event loop in which it is created
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=self._timeout,
                headers=UNCOMPRESSED | secret.header(),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        async with self._session.post(url, data=content, headers=headers, allow_redirects=False) as answer:
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise aiohttp.ClientPayloadError("the answer is compressed, although no encoding was accepted")
            chunks, left = [], self._largest
            async for chunk in answer.content.iter_any():
                chunks.append(chunk)
                left -= len(chunk)
                if left < 0:
                    raise aiohttp.ClientPayloadError("the answer is too long")
            return RouterAnswer(answer.status, answer.headers, b"".join(chunks))

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
