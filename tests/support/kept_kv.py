"""A weight update while prefill engines hold KV blocks that paused decode engines have not fetched yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, PolicyVersion
from primeslurm.wire.transport import secret
from tests.support.generate import generate, metric
from tests.support.processes import Server

UPDATE_S = 300.0


async def update_while_kv_is_kept(
    prefill: Sequence[Server],
    decode: Sequence[Server],
    router: Server,
    client: Callable[[Server], EngineClient],
    policy: PolicyVersion,
    prompt: list[int],
) -> dict[str, Any]:
    """Pause decode engines, prefill a prompt, and update prefill before decode engines. Return the completion."""
    await asyncio.gather(*(asyncio.to_thread(pause, engine) for engine in decode))
    before = finished(prefill)
    answer = asyncio.create_task(asyncio.to_thread(generate, router.url, prompt, 8, session="kept", timeout_s=600))
    while finished(prefill) == before:
        await asyncio.sleep(0.1)
    for group in (prefill, decode):
        await asyncio.gather(*(client(engine).apply(policy, UPDATE_S) for engine in group))
    return await answer


def kv_given_up(prefill: Sequence[Server]) -> float:
    """Count the prompts whose KV blocks expired on prefill engines."""
    return sum(metric(engine.url, "vllm:nixl_num_kv_expired_reqs_total") for engine in prefill)


def pause(engine: Server) -> None:
    """Pause an engine as the orchestrator does."""
    where = f"{engine.url}/pause?mode=keep&clear_cache=false"
    httpx.post(where, headers=secret.header(), timeout=120, verify=False).raise_for_status()


def finished(engines: Sequence[Server]) -> float:
    """Count the requests that the engines have finished."""
    return sum(metric(engine.url, "vllm:request_success_total") for engine in engines)
