"""Patch of vLLM's publisher of KV events, which tell a router the KV blocks that an engine has cached.

Events hold the token ids of prompts, and vllm-router cannot decrypt ZMQ messages or authenticate itself. So the sockets
accept connections from the node of the replica's router only. For vllm-router, cache salts are hidden in the events as
in requests.
"""

from __future__ import annotations

from typing import Any

import zmq

from primeslurm.inference import patches
from primeslurm.wire import cache_salt

LOOPBACK = "127.0.0.1"


def use(reader: str, hides_salt: bool) -> None:
    """Make vLLM publish KV events to address `reader` only, with hidden salts if `hides_salt`. Raise RuntimeError."""
    from vllm.distributed import kv_events
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.async_llm import AsyncLLM

    patches.expect(kv_events.ZmqEventPublisher, "__init__", ["data_parallel_rank", "endpoint", "replay_endpoint"])
    patches.expect(kv_events.ZmqEventPublisher, "_is_bind_endpoint", ["endpoint"])
    patches.expect(kv_events.ZmqEventPublisher, "_bind", ["sock", "endpoint"])
    sources = patches.expect(AsyncLLM, "get_kv_event_sources", ["self"])

    build_event = patches.expect(BlockPool, "_build_block_stored_event", ["request", "start_token_idx"])

    # vllm-router expects data-parallel rank 0 from every engine with an address of its own.
    class RunPublisher(kv_events.ZmqEventPublisher):
        def __init__(self, data_parallel_rank: int, **config: Any) -> None:
            # vLLM would add the rank to the ports.
            super().__init__(0, **config)

        def publish(self, events: Any) -> None:
            # At a block with more than tokens, such as an image, the router would forget all blocks of this engine.
            if hides_salt:
                events.events = [each for each in events.events if not any(getattr(each, "extra_keys", None) or ())]
            super().publish(events)

        @staticmethod
        def _is_bind_endpoint(endpoint: str) -> bool:
            return True  # vLLM would connect to an endpoint with an address, and bind only `*`

        @staticmethod
        def _bind(sock: Any, endpoint: str) -> str:
            # To any loopback address, the kernel connects from 127.0.0.1.
            for address in (reader, LOOPBACK) if reader.startswith("127.") else (reader,):
                sock.setsockopt(zmq.TCP_ACCEPT_FILTER, address.encode())
            sock.bind(endpoint)
            return endpoint

    def event_with_marked_salt(pool: Any, request: Any, **blocks: Any) -> Any:
        event, salt = build_event(pool, request, **blocks), request.cache_salt
        if salt and blocks["start_token_idx"] == 0:  # only the first block's hash contains the salt itself
            event.token_ids = [cache_salt.marked(event.token_ids[0], salt), *event.token_ids[1:]]
            others = [[key for key in keys or () if key != salt] for keys in event.extra_keys]
            event.extra_keys = [tuple(keys) or None for keys in others]
        return event

    def own_sources(engine: Any) -> dict[int, Any]:
        return dict(enumerate(sources(engine).values()))

    if hides_salt:
        BlockPool._build_block_stored_event = event_with_marked_salt
    kv_events.EventPublisherFactory._registry["zmq"] = RunPublisher
    AsyncLLM.get_kv_event_sources = own_sources
