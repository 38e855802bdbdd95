"""The child: vllm-router itself. What must be in no command line and in no environment comes on its standard input."""

from __future__ import annotations

import os
import sys

import msgspec

from primeslurm.wire.decoding import decode_json

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class RouterOrder(msgspec.Struct, frozen=True):
    """What a keeper tells its router, as JSON."""

    argv: list[str]
    """Options of vllm-router."""
    keys: str
    """URL that says whether a token is good."""
    token: str
    """What a router over prefill and decode engines shows them."""


def main(order: RouterOrder) -> None:
    """Serve until ended."""
    from vllm_router.launch_router import launch_router, parse_router_args

    os.environ["OPENAI_API_KEY"] = order.token
    for name in PROXIES:  # a proxy would be shown the secret
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    arguments = parse_router_args(order.argv)
    arguments.api_key_validation_urls = [order.keys]  # handed on to the router, which knows it
    launch_router(arguments)


if __name__ == "__main__":
    main(decode_json(sys.stdin.buffer.read(), RouterOrder))
