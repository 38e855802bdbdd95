"""The child: vllm-router itself. What must be in no command line and in no environment comes on its standard input."""

from __future__ import annotations

import json
import os
import sys

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def main(order: dict[str, object]) -> None:
    """Serve until ended.

    Args:
        order: `argv` of vllm-router, `keys` (the URL that says whether a token is good), and `token`, which a router
            over prefill and decode engines shows them.
    """
    from vllm_router.launch_router import launch_router, parse_router_args

    os.environ["OPENAI_API_KEY"] = str(order["token"])
    for name in PROXIES:  # a proxy would be shown the secret
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    argv = order["argv"]
    assert isinstance(argv, list)
    arguments = parse_router_args(argv)
    arguments.api_key_validation_urls = [order["keys"]]  # handed on to the router, which knows it
    launch_router(arguments)


if __name__ == "__main__":
    main(json.load(sys.stdin))
