"""Load of engines: a few values from the `/metrics` of each."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from primeslurm.orchestrator.weight_transfer.polling import UNRESPONSIVE_S

Sample = dict[str, float]  # values of one engine at one moment: gauges, and counters since the engine's start

ENGINE = re.compile(r"^(?P<role>\w+?)-r(?P<replica>\d+)-")  # beginning of the process name of a replica's engine
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
_FIELDS = {  # metrics that are summed over all their labels
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "prompted",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
}
_LABELLED = {  # metrics with one label that selects the value
    ("vllm:num_requests_waiting_by_reason", "reason", "capacity"): "waiting_capacity",
    ("vllm:num_requests_waiting_by_reason", "reason", "deferred"): "waiting_deferred",
    ("vllm:prompt_tokens_by_source_total", "source", "local_compute"): "computed",
}
_LINE_STARTS = tuple(f"{name}{end}" for name in {*_FIELDS, *(name for name, _, _ in _LABELLED)} for end in ("{", " "))

_CONCURRENT = 32  # Engines that are asked at once. A thousand answers together would block the event loop.


class EngineMetrics(NamedTuple):
    """Samples of all engines at one moment."""

    samples: dict[str, Sample]  # samples of engines that answered, by name
    # Engines that accepted the connection and did not answer in time. Other missing engines are down.
    unresponsive: frozenset[str] = frozenset()


def parse(text: str) -> Sample:
    """Return the values in one engine's Prometheus text. Raise ValueError if it is malformed."""
    # Most of an engine's thousand lines are histograms, and the parser takes about 10 us per line.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(_LINE_STARTS))
    sample: Sample = {}
    for family in text_string_to_metric_families(lines + "\n"):
        for name, labels, value, *_ in family.samples:
            field = _FIELDS.get(name) or next(
                (
                    f
                    for (metric, label, wanted), f in _LABELLED.items()
                    if metric == name and labels.get(label) == wanted
                ),
                "",
            )
            if field and math.isfinite(value):  # Prometheus has NaN and +Inf, too
                sample[field] = sample.get(field, 0.0) + value
    return sample


class LastSamples:
    """The last sample of each engine, which stays valid while the engine is briefly unresponsive."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Sample]] = {}

    def fill(self, now: float, samples: Mapping[str, Sample], unresponsive: Collection[str]) -> dict[str, Sample]:
        """Add new samples. Return them, and the last ones of engines that are unresponsive for up to UNRESPONSIVE_S."""
        recent = {name: self._last[name] for name in unresponsive if name in self._last}
        recent = {name: (at, sample) for name, (at, sample) in recent.items() if now - at <= UNRESPONSIVE_S}
        self._last = recent | {name: (now, sample) for name, sample in samples.items()}
        return {name: sample for name, (_, sample) in self._last.items()}


async def scrape(client: httpx.AsyncClient, engines: Mapping[str, str], timeout_s: float = 2.0) -> EngineMetrics:
    limit = asyncio.Semaphore(_CONCURRENT)
    unresponsive = []

    async def fetch(name: str, url: str) -> tuple[str, Sample | None]:
        async with limit:
            try:
                answer = await client.get(f"{url}/metrics", timeout=timeout_s)
                return name, parse(answer.content.decode(errors="replace")) if answer.is_success else None
            except httpx.ReadTimeout:
                unresponsive.append(name)
            except (httpx.HTTPError, ValueError):
                pass
            return name, None

    answers = await asyncio.gather(*(fetch(name, url) for name, url in engines.items()))
    return EngineMetrics({name: sample for name, sample in answers if sample is not None}, frozenset(unresponsive))
