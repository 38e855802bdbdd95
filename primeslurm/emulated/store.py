"""Emulated Mooncake master or client: accepts the real arguments, reports that it is healthy, and stores nothing."""

from __future__ import annotations

import argparse
import asyncio

from primeslurm.emulated import http
from primeslurm.inference.admission import Receive, Scope, Send


async def healthy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with 200."""
    await http.answer(send, 200, {})


async def serve(host: str, port: int) -> None:
    """Serve until cancelled."""
    server = await http.start(healthy, host, port)
    async with server:
        await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    """Serve at the address of a master's metrics or of a client's HTTP server."""
    parser = argparse.ArgumentParser(prog="primeslurm.emulated.store", allow_abbrev=False)
    parser.add_argument("--host", "--metrics_host", dest="host", required=True)
    parser.add_argument("--http_port", "--metrics_port", dest="port", type=int, required=True)
    options, _ = parser.parse_known_args(argv)
    asyncio.run(serve(options.host, options.port))


if __name__ == "__main__":
    main()
