"""Emulated part of a KV store: `python -m primeslurm.emulated.store` with Mooncake's command lines.

Stand-in engines store nothing, so all it does is to be there and healthy.
"""

from __future__ import annotations

import argparse
import asyncio

from primeslurm.emulated import http
from primeslurm.emulated.http import Receive, Scope, Send


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Everything is fine."""
    await http.answer(send, 200, {})


async def _serve(host: str, port: int) -> None:
    async with await http.start(app, host, port) as server:
        await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    """Entry point. The master and the clients name their HTTP servers differently."""
    parser = argparse.ArgumentParser(prog="primeslurm.emulated.store", allow_abbrev=False)
    parser.add_argument("--host", "--metrics_host", dest="host", required=True)
    parser.add_argument("--http_port", "--metrics_port", dest="port", type=int, required=True)
    options, _ = parser.parse_known_args(argv)
    asyncio.run(_serve(options.host, options.port))


if __name__ == "__main__":
    main()
