"""What stands in front of an inference replica's engines."""

from __future__ import annotations

from typing import Literal

from primeslurm.recipe.base import Section


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


Router = VllmRouter
