"""The child process that runs vllm-router. It reads secrets from standard input, not from arguments or environment."""

from __future__ import annotations

import os
import sys

import msgspec

from primeslurm.wire.decoding import decode_json

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class RouterOrder(msgspec.Struct, frozen=True):
    """Settings that the supervisor sends to its router, as JSON."""

    argv: list[str]  # Options of vllm-router
    token_url: str  # URL at which the router checks clients' tokens
    token: str  # Token that the router sends to prefill and decode engines


def main(order: RouterOrder) -> None:
    from vllm_router.launch_router import launch_router, parse_router_args

    os.environ["OPENAI_API_KEY"] = order.token
    for name in PROXIES:  # a proxy would see the secret
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    arguments = parse_router_args(order.argv)
    arguments.api_key_validation_urls = [order.token_url]  # vllm-router has this setting, but no option for it
    if arguments.prefill_policy == "kv_aware":
        # It asks prefill engines for their KV events and for the tokens of chats.
        arguments.api_key = order.token
    launch_router(arguments)


if __name__ == "__main__":
    main(decode_json(sys.stdin.buffer.read(), RouterOrder))
