"""Routers in front of the engines of an inference replica."""

from __future__ import annotations

from typing import Literal

from primeslurm.recipe.fields.section import Section

RouterPolicy = Literal[
    "consistent_hash",
    "round_robin",
    "cache_aware",
    "kv_aware",
    "power_of_two",
    "random",
    "sticky_least_loaded",
]


class VllmRouter(Section):
    """vllm-router: one Rust process per replica."""

    type: Literal["vllm-router"] = "vllm-router"
    policy: RouterPolicy = "consistent_hash"
    """Rule that spreads requests over engines. consistent_hash keeps all requests of a rollout on one engine, so that
    its prefix stays cached. kv_aware prefers engines that report the prefix as cached; they publish token ids without
    encryption (docs/explanation/security.md)."""
    decode_policy: RouterPolicy | None = None
    """Rule that spreads requests over decode engines, if prefill and decode engines are separate. Here, kv_aware takes
    the engine with the fewest requests. Default: `policy`."""
    extra: dict[str, object] = {}
    """Any other vllm-router option by its long name with underscores."""


class DynamoRouter(Section):
    """NVIDIA Dynamo: its frontend, with Dynamo's own vLLM workers. vLLM's server runs in each, for weight updates."""

    type: Literal["dynamo"] = "dynamo"
    mode: Literal["kv", "round-robin", "random", "power-of-two", "least-loaded"] = "kv"
    """Rule that spreads requests over workers. kv: to the worker that has cached most of the prefix."""
    session_ttl_s: int | None = None
    """Seconds without a request for which a session stays on its engine. Default: sessions are not pinned."""
    extra: dict[str, object] = {}
    """Any other dynamo.frontend option by its long name with underscores."""


class LlmdRouter(Section):
    """llm-d: an endpoint picker that scores engines, behind Envoy, with a sidecar at each decode engine."""

    type: Literal["llm-d"] = "llm-d"
    scorers: dict[str, float] = {"prefix-cache-scorer": 3, "active-request-scorer": 2}
    """Weight of each scorer plugin, for all engines."""
    prefill_scorers: dict[str, float] = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2}
    """Weight of additional scorer plugins for prefill engines."""
    non_cached_tokens: int = 16
    """A decode engine answers without a prefill engine if fewer prompt tokens than this are not cached."""


Router = VllmRouter | DynamoRouter | LlmdRouter
