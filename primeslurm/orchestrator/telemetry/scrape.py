"""What the engines say about their load: a few numbers from each one's /metrics."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping

import httpx

Sample = dict[str, float]
"""One engine at one moment: gauges as they are, counters since the engine's start."""

ENGINE = re.compile(r"^(?P<role>\w+?)-r(?P<replica>\d+)-")
"""How the name of a replica's engine begins."""
GAUGES = ("running", "waiting", "waiting_capacity", "waiting_deferred", "kv_usage")
COUNTERS = (
    "generated",
    "prompted",
    "computed",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "external_queries",
    "external_hits",
)
_PLAIN = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_usage",
    "generation_tokens_total": "generated",
    "prompt_tokens_total": "prompted",
    "num_preemptions_total": "preemptions",
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
    "external_prefix_cache_queries_total": "external_queries",
    "external_prefix_cache_hits_total": "external_hits",
}
_LABELLED = {
    ("num_requests_waiting_by_reason", 'reason="capacity"'): "waiting_capacity",
    ("num_requests_waiting_by_reason", 'reason="deferred"'): "waiting_deferred",
    ("prompt_tokens_by_source_total", 'source="local_compute"'): "computed",
}
_NAMES = {*_PLAIN, *(name for name, _ in _LABELLED)}
# One search over the whole text: most of its thousand lines are histograms that nobody here wants.
_SAMPLE = re.compile(rf"^vllm:({'|'.join(sorted(_NAMES))})(?:\{{([^}}]*)\}})? (\S+)$", re.MULTILINE)

_TIMEOUT_S = 2.0
_AT_ONCE = 32
"""Engines asked at the same time: a thousand answers together would hold up everything else in this process."""


def parse(text: str) -> Sample:
    """Read the wanted values of one engine's Prometheus text, summed over the labels that do not matter."""
    found: Sample = {}
    for name, labels, value in _SAMPLE.findall(text):
        field = _PLAIN.get(name) or next(
            (f for (n, label), f in _LABELLED.items() if n == name and label in labels), ""
        )
        if field and (number := _number(value)) is not None:
            found[field] = found.get(field, 0.0) + number
    return found


def _number(text: str) -> float | None:
    """A value that can be added to others; Prometheus also writes NaN and +Inf."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


async def scrape(client: httpx.AsyncClient, engines: Mapping[str, str]) -> dict[str, Sample]:
    """Ask engines for their metrics.

    Args:
        client: for requests within the run.
        engines: URL by name.

    Returns:
        A sample by engine name; an engine that does not answer within 2 s is left out.
    """
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str, url: str) -> tuple[str, Sample | None]:
        async with gate:
            try:
                answer = await client.get(f"{url}/metrics", timeout=_TIMEOUT_S)
            except httpx.HTTPError:
                return name, None
        return name, parse(answer.content.decode(errors="replace")) if answer.is_success else None

    answers = await asyncio.gather(*(one(name, url) for name, url in engines.items()))
    return {name: sample for name, sample in answers if sample is not None}
