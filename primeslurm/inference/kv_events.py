"""vLLM's publisher of KV events as a run uses it.

Events hold the token ids of prompts, and vllm-router cannot decrypt ZMQ messages or authenticate itself. So the sockets
accept connections from the node of the replica's router only.
"""

from __future__ import annotations

from typing import Any

import zmq

from primeslurm.inference import patches

LOOPBACK = "127.0.0.1"


def use(reader: str) -> None:
    """Make vLLM publish KV events to the address `reader` only. Raise RuntimeError if vLLM's code has changed."""
    from vllm.distributed import kv_events
    from vllm.v1.engine.async_llm import AsyncLLM

    patches.expect(kv_events.ZmqEventPublisher, "__init__", ["data_parallel_rank", "endpoint", "replay_endpoint"])
    patches.expect(kv_events.ZmqEventPublisher, "_is_bind_endpoint", ["endpoint"])
    patches.expect(kv_events.ZmqEventPublisher, "_bind", ["sock", "endpoint"])
    sources = patches.expect(AsyncLLM, "get_kv_event_sources", ["self"])

    # vllm-router expects data-parallel rank 0 from every engine with an address of its own.
    class RunPublisher(kv_events.ZmqEventPublisher):
        def __init__(self, data_parallel_rank: int, **config: Any) -> None:
            # vLLM would add the rank to the ports.
            super().__init__(0, **config)

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

    def own_sources(engine: Any) -> dict[int, Any]:
        return dict(enumerate(sources(engine).values()))

    kv_events.EventPublisherFactory._registry["zmq"] = RunPublisher
    AsyncLLM.get_kv_event_sources = own_sources
