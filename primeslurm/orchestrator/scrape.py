"""What the engines say about their load: a few numbers from each one's /metrics, as often as it is asked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import httpx

_WANTED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "prompted",
    "vllm:prefix_cache_hits_total": "cache_hits",
    "vllm:num_preemptions_total": "preemptions",
}
_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? ([^ ]+)$")

Load = dict[str, float]


def parse(text: str) -> Load:
    """The wanted values of one engine's Prometheus text, summed over its labels."""
    load: Load = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] in _WANTED:
            name = _WANTED[match[1]]
            load[name] = load.get(name, 0.0) + float(match[2])
    return load


async def scrape(engines: Mapping[str, str]) -> dict[str, Load]:
    """Load by engine name; an engine that does not answer within 2 s is left out."""
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:

        async def one(name: str, url: str) -> tuple[str, Load | None]:
            try:
                answer = await client.get(f"{url}/metrics")
                return name, parse(answer.text) if answer.is_success else None
            except httpx.HTTPError:
                return name, None

        loads = await asyncio.gather(*(one(name, url) for name, url in engines.items()))
    return {name: load for name, load in loads if load is not None}


def by_role(loads: Mapping[str, Load]) -> dict[str, Load]:
    """Sums of running and waiting, and the highest kv_usage, by role: the part of an engine's name before `-r`."""
    roles: dict[str, Load] = {}
    for name, load in loads.items():
        total = roles.setdefault(name.split("-", 1)[0], {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0})
        for key in ("running", "waiting"):
            total[key] += load.get(key, 0.0)
        total["kv_usage"] = max(total["kv_usage"], load.get("kv_usage", 0.0))
    return roles
