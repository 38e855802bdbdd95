"""HTTP clients: those that stay within a run, and those that leave it.

Agents probe their servers with the standard library instead: they live beside engines and start before everything else.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from primeslurm.wire import secret

CONNECT_S = 10.0
"""Within a cluster, who has not taken a connection for this long will not."""
KEPT = 64
"""Idle connections that a client of many requests keeps."""


def client_within_run(
    timeout_s: float | None, keep: int = KEPT, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """A client for processes of this run: plain HTTP/1.1, past any proxy, as many connections as there are requests.

    Args:
        timeout_s: for an answer; None: as long as it takes.
        keep: idle connections kept; 0 for servers that close them sooner than the next request comes.
        headers: instead of the run's secret.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=keep),
        headers=secret.header() if headers is None else headers,
        trust_env=False,
        verify=False,  # plain HTTP: every client would load all certificates of the machine
    )


def client_out_of_run(timeout_s: float, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client for a server that is no part of the run: through the site's proxy, and certificates are verified."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT),
        headers=headers,
    )
