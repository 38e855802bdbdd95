"""What stands in front of an inference replica's engines."""

from __future__ import annotations

from typing import Literal

from primeslurm.recipe.fields.section import Section


class VllmRouter(Section):
    """vllm-router: one Rust process per replica."""

    type: Literal["vllm-router"] = "vllm-router"
    policy: Literal[
        "consistent_hash",
        "round_robin",
        "cache_aware",
        "kv_aware",
        "power_of_two",
        "random",
        "sticky_least_loaded",
    ] = "consistent_hash"
    """consistent_hash pins a rollout to an engine by its X-Session-ID header."""
    extra: dict[str, object] = {}
    """Any other option of vllm-router, by its long name with underscores."""


class DynamoRouter(Section):
    """NVIDIA Dynamo: its frontend, and its own vLLM workers in place of vLLM's servers.

    Only for task serve: workers have no gate and their answers do not say which policy sampled a token.
    """

    type: Literal["dynamo"] = "dynamo"
    mode: Literal["kv", "round-robin", "random", "power-of-two", "least-loaded"] = "kv"
    """kv sends a request where most of its prefix is cached."""
    session_ttl_s: int | None = None
    """Keep a session on its engine until it was silent for this many seconds. Default: sessions are not pinned."""
    extra: dict[str, object] = {}
    """Any other option of dynamo.frontend, by its long name with underscores."""


class LlmdRouter(Section):
    """llm-d: an endpoint picker that scores engines behind an Envoy, and a sidecar at each decode engine."""

    type: Literal["llm-d"] = "llm-d"
    scorers: dict[str, float] = {"prefix-cache-scorer": 3, "active-request-scorer": 2}
    """Weight of each scorer plugin, for all engines."""
    prefill_scorers: dict[str, float] = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2}
    """More of them for prefill engines."""
    non_cached_tokens: int = 16
    """With fewer tokens of the prompt to compute, a decode engine answers alone."""


Router = VllmRouter | DynamoRouter | LlmdRouter
