"""What the engines say about their load: a few numbers from each one's /metrics."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import httpx

from primeslurm.orchestrator.weight_transfer.polling import UNRESPONSIVE_S

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

_AT_ONCE = 32
"""Engines asked at the same time: a thousand answers together would hold up everything else in this process."""


class EngineMetrics(NamedTuple):
    """One look at all engines."""

    samples: dict[str, Sample]
    """By name, of those that answered."""
    silent: frozenset[str] = frozenset()
    """Names of those that took the connection and did not answer in time. Others are gone, or say nothing useful."""


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


class LastSamples:
    """What engines said last, which holds while they are silent for a while."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Sample]] = {}

    def fill(self, now: float, samples: Mapping[str, Sample], silent: Collection[str]) -> dict[str, Sample]:
        """Take in a look.

        Args:
            now: seconds.
            samples: of the engines that answered, by name.
            silent: names of those that took a connection and did not answer.

        Returns:
            The samples, with the last ones of engines that have been silent for UNRESPONSIVE_S at most.
        """
        kept = {name: self._last[name] for name in silent if name in self._last}
        kept = {name: (at, sample) for name, (at, sample) in kept.items() if now - at <= UNRESPONSIVE_S}
        self._last = kept | {name: (now, sample) for name, sample in samples.items()}
        return {name: sample for name, (_, sample) in self._last.items()}


async def scrape(client: httpx.AsyncClient, engines: Mapping[str, str], timeout_s: float = 2.0) -> EngineMetrics:
    """Ask engines for their metrics.

    Args:
        client: for requests within the run.
        engines: URL by name.
        timeout_s: for each answer.

    Returns:
        What they said, and who took longer.
    """
    gate = asyncio.Semaphore(_AT_ONCE)
    silent = []

    async def one(name: str, url: str) -> tuple[str, Sample | None]:
        async with gate:
            try:
                answer = await client.get(f"{url}/metrics", timeout=timeout_s)
            except httpx.ReadTimeout:
                silent.append(name)
                return name, None
            except httpx.HTTPError:
                return name, None
        return name, parse(answer.content.decode(errors="replace")) if answer.is_success else None

    answers = await asyncio.gather(*(one(name, url) for name, url in engines.items()))
    return EngineMetrics({name: sample for name, sample in answers if sample is not None}, frozenset(silent))
