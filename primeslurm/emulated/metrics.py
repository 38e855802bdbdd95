"""An emulated engine's /metrics: the names that vLLM uses, for what the model of the engine knows."""

from __future__ import annotations

from primeslurm.emulated.scheduler import Scheduler


def exposition(scheduler: Scheduler) -> str:
    """The Prometheus text."""
    counts = scheduler.counts
    by_source = "prompt_tokens_by_source_total"
    values: dict[str, float] = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": scheduler.held,
        "num_requests_waiting_by_reason|reason=capacity": scheduler.held,
        "kv_cache_usage_perc": scheduler.used_blocks / scheduler.blocks,
        "prompt_tokens_total": counts["prompt_tokens"],
        "generation_tokens_total": counts["generation_tokens"],
        "num_preemptions_total": counts["preemptions"],
        "prefix_cache_queries_total": counts["prefix_queries"],
        "prefix_cache_hits_total": counts["prefix_hits"],
        "external_prefix_cache_queries_total": counts["external_queries"],
        "external_prefix_cache_hits_total": counts["external_hits"],
        f"{by_source}|source=local_compute": counts["computed_tokens"],
        f"{by_source}|source=local_cache_hit": counts["prefix_hits"],
        f"{by_source}|source=external_kv_transfer": counts["external_hits"],
        "request_success_total|finished_reason=stop": counts["success_stop"],
        "request_success_total|finished_reason=length": counts["success_length"],
    }
    return "".join(f"{_sample(name)} {value}\n" for name, value in values.items())


def _sample(name: str) -> str:
    metric, _, label = name.partition("|")
    key, _, value = label.partition("=")
    extra = f',{key}="{value}"' if label else ""
    return f'vllm:{metric}{{engine="0",model_name="policy"{extra}}}'
