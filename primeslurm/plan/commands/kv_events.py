"""KV events: engines publish which blocks they cache, and a router that sends requests there reads them. Pure.

An engine publishes each change, and keeps the last ones for a router that restarts. Decode engines publish nothing,
because vllm-router only balances their load. A Dynamo worker reads its own engine's events, and tells its frontend.
"""

from __future__ import annotations

from typing import Any

from primeslurm.plan.commands.command import EngineRole, ReplicaEngines, url_of
from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.routers import DynamoRouter
from primeslurm.wire.names import KV_EVENTS_HIDE_SALT, KV_EVENTS_READER, SERVED_MODEL

# Names of an engine's ports for changes and for past changes
EVENTS, REPLAY = "kv_events", "kv_replay"
# Tokens per KV block. 64 suits more of vLLM's attention backends than any other number.
BLOCK_SIZE = 64
_LOOPBACK = "127.0.0.1"


def are_read(recipe: Recipe) -> bool:
    return recipe.inference.reads_kv_events


def _read_by_worker(recipe: Recipe) -> bool:
    router = recipe.inference.router
    return isinstance(router, DynamoRouter) and router.mode == "kv"


def ports(recipe: Recipe, role: EngineRole) -> tuple[str, ...]:
    if _read_by_worker(recipe):
        return (EVENTS,)
    return (EVENTS, REPLAY) if are_read(recipe) and role != "decode" else ()


def publisher(recipe: Recipe, role: EngineRole) -> dict[str, Any] | None:
    """Return vLLM's `--kv-events-config`; None if engines of a role publish nothing."""
    if not ports(recipe, role):
        return None
    if _read_by_worker(recipe):
        return {"enable_kv_cache_events": True, "endpoint": f"tcp://{_LOOPBACK}:${{port:{EVENTS}}}"}
    endpoint, replay_endpoint = (f"tcp://${{host}}:${{port:{port}}}" for port in (EVENTS, REPLAY))
    return {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay_endpoint}


def engine_env(recipe: Recipe, role: EngineRole, router: str) -> dict[str, str]:
    """Return the variables with the only address that may read the events of an engine, and the form of salts."""
    if _read_by_worker(recipe):
        return {KV_EVENTS_READER: _LOOPBACK}
    return {KV_EVENTS_READER: f"${{host:{router}}}", KV_EVENTS_HIDE_SALT: "1"} if ports(recipe, role) else {}


def router_options(workers: ReplicaEngines) -> list[str]:
    """Return the options of vllm-router that name the events of a replica's engines."""
    # It asks prefill engines for their ports and block size. Its options for them allow neither past changes nor blocks
    # of other than 16 tokens.
    if workers.disaggregated:
        return []
    words = ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", SERVED_MODEL]
    for name in workers.engines:
        words += ["--kv-event-source", _source(name, EVENTS), "--kv-event-replay-source", _source(name, REPLAY)]
    return words


def _source(engine: str, port: str) -> str:
    return f"{url_of(engine)}=tcp://${{addr:{engine}:{port}}}"
