"""What the orchestrator says about the load of a group of engines: one role of the run, or one role of a replica."""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True):
    """Engines of one role. `_mean` and `_per_s` are over the last `seconds`; the rest is from the newest look."""

    engines: int = 0
    """How many of them answered."""
    running: float = 0.0
    """Requests being worked on, all engines together."""
    waiting: float = 0.0
    """Requests that wait, all engines together."""
    waiting_capacity: float = 0.0
    """Of these: for room in the batch or the KV cache."""
    waiting_deferred: float = 0.0
    """Of these: for something else, on a decode engine for KV from a prefill engine."""
    kv_usage: float = 0.0
    """Used share of the KV cache, 0 to 1, of the fullest engine."""
    seconds: float = 0.0
    """How far back means and rates go."""
    running_mean: float = 0.0
    """Requests being worked on, all engines together."""
    waiting_mean: float = 0.0
    """Requests that wait, all engines together."""
    deferred_mean: float = 0.0
    """Of these: not for room, but for something else."""
    kv_usage_mean: float = 0.0
    """Used share of the KV cache, mean over the engines."""
    busy_mean: float = 0.0
    """Share of the looks at which an engine had anything to do."""
    generated_per_s: float = 0.0
    """Sampled tokens."""
    prompted_per_s: float = 0.0
    """Prompt tokens of all requests, computed or not."""
    computed_per_s: float = 0.0
    """Prompt tokens that had to be computed: neither cached nor handed over."""
    preemptions_per_s: float = 0.0
    """Requests that lost their KV cache to others and start again."""
    prefix_hit_rate: float | None = None
    """Share of the prompt tokens looked up that were in the engine's own cache; None: nothing was looked up."""
    external_hit_rate: float | None = None
    """The same for KV from outside: other engines (NIXL) and offload tiers."""
