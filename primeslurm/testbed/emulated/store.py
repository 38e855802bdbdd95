"""Emulated Mooncake master or client: accepts the real arguments, reports that it is healthy, and stores nothing."""

from __future__ import annotations

import argparse
import asyncio

from primeslurm.inference.auth import Receive, Scope, Send
from primeslurm.testbed.emulated import http_server


async def healthy(scope: Scope, receive: Receive, send: Send) -> None:
    await http_server.answer(send, 200, {})


async def serve(host: str, port: int) -> None:
    server = await http_server.start(healthy, host, port)
    async with server:
        await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    """Serve at the address of a master's metrics or of a client's HTTP server."""
    parser = argparse.ArgumentParser(prog="primeslurm.testbed.emulated.store", allow_abbrev=False)
    parser.add_argument("--host", "--metrics_host", dest="host", required=True)
    parser.add_argument("--http_port", "--metrics_port", dest="port", type=int, required=True)
    options, _ = parser.parse_known_args(argv)
    asyncio.run(serve(options.host, options.port))


if __name__ == "__main__":
    main()
