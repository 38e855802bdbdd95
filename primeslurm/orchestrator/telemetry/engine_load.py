"""Load of engines: a few values from the `/metrics` of each, and their means by role and replica over a minute."""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from primeslurm.orchestrator.weight_updates.polling import UNRESPONSIVE_S
from primeslurm.records.state import Load

Sample = dict[str, float]  # values of one engine at one moment: gauges, and counters since the engine's start

ENGINE = re.compile(r"^(?P<role>\w+?)-r(?P<replica>\d+)-")  # beginning of the process name of a replica's engine
GAUGES = ("running", "waiting", "waiting_capacity", "waiting_deferred", "kv_usage")
_FIELDS = {  # metrics that are summed over all their labels
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:generation_tokens_total": "generated",
    "vllm:prompt_tokens_total": "prompted",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_success_total": "requests",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
_LABELLED = {  # metrics with one label that selects the value
    ("vllm:num_requests_waiting_by_reason", "reason", "capacity"): "waiting_capacity",
    ("vllm:num_requests_waiting_by_reason", "reason", "deferred"): "waiting_deferred",
    ("vllm:prompt_tokens_by_source_total", "source", "local_compute"): "computed",
}
COUNTERS = tuple(field for field in (*_FIELDS.values(), *_LABELLED.values()) if field not in GAUGES)
_LINE_STARTS = tuple(f"{name}{end}" for name in {*_FIELDS, *(name for name, _, _ in _LABELLED)} for end in ("{", " "))

_CONCURRENT = 32  # Engines that are asked at once. A thousand answers together would block the event loop.
WINDOW_S = 60.0  # length of the window, long enough that a weight update does not look like a trend


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
            labelled = (_LABELLED.get((name, *label), "") for label in labels.items())
            field = _FIELDS.get(name) or next(filter(None, labelled), "")
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


class _Engine:
    """Recent samples of one engine, with counters that continue over restarts."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, Sample]] = deque()
        self._before: Sample = {}
        self._totals = dict.fromkeys(COUNTERS, 0.0)

    def add(self, now: float, sample: Sample, window_s: float) -> None:
        for name in COUNTERS:
            value, before = sample.get(name, 0.0), self._before.get(name)
            if before is not None:
                # A restarted engine counts from zero again.
                self._totals[name] += value - before if value >= before else value
        self._before = sample
        self.samples.append((now, {**{name: sample.get(name, 0.0) for name in GAUGES}, **self._totals}))
        while self.samples[0][0] < now - window_s:
            self.samples.popleft()

    @property
    def tokens(self) -> float:
        return self._totals["generated"] + self._totals["prompted"]

    @property
    def newest(self) -> Sample:
        return self.samples[-1][1]

    @property
    def seconds(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]

    def mean(self, name: str) -> float:
        return fmean(sample[name] for _, sample in self.samples)

    def busy(self) -> float:
        return fmean(sample["running"] + sample["waiting"] > 0 for _, sample in self.samples)

    def increase(self, name: str) -> float:
        return self.samples[-1][1][name] - self.samples[0][1][name]


class LoadWindow:
    """Samples of all engines over the last minute."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._engines: dict[str, _Engine] = {}
        self._answered: set[str] = set()

    def add(self, now: float, samples: Mapping[str, Sample]) -> None:
        """Add samples taken at `now` [s]. Engines without a sample did not answer."""
        self._answered = set(samples)
        for name, sample in samples.items():
            self._engines.setdefault(name, _Engine()).add(now, sample, self._window_s)

    @property
    def tokens(self) -> float:
        """Return the number of prompt and generated tokens so far. It never decreases."""
        return sum(engine.tokens for engine in self._engines.values())

    def by_role(self) -> dict[str, Load]:
        return {role: _sum(engines) for (role,), engines in self._grouped("role").items()}

    def by_replica(self) -> dict[str, dict[str, Load]]:
        loads: dict[str, dict[str, Load]] = {}
        for (replica, role), engines in self._grouped("replica", "role").items():
            loads.setdefault(replica, {})[role] = _sum(engines)
        return loads

    def _grouped(self, *keys: str) -> dict[tuple[str, ...], list[_Engine]]:
        groups: dict[tuple[str, ...], list[_Engine]] = {}
        for name in sorted(self._answered):
            if match := ENGINE.match(name):
                groups.setdefault(tuple(match[key] for key in keys), []).append(self._engines[name])
        return groups


def rounded(loads: Mapping[str, Load]) -> dict[str, Load]:
    return {name: msgspec.structs.replace(load, **_rounded_fields(load)) for name, load in loads.items()}


def _rounded_fields(load: Load) -> dict[str, float]:
    return {name: round(v, 4) for name, v in msgspec.structs.asdict(load).items() if isinstance(v, float)}


def _sum(engines: Sequence[_Engine]) -> Load:
    def now(name: str) -> float:
        return sum(engine.newest[name] for engine in engines)

    def mean(name: str) -> float:
        return sum(engine.mean(name) for engine in engines)

    def rate(name: str) -> float:
        return sum(engine.increase(name) / engine.seconds for engine in engines if engine.seconds)

    def fraction(hits: str, queries: str) -> float | None:
        total = sum(engine.increase(queries) for engine in engines)
        return sum(engine.increase(hits) for engine in engines) / total if total else None

    return Load(
        engines=len(engines),
        running=now("running"),
        waiting=now("waiting"),
        waiting_capacity=now("waiting_capacity"),
        waiting_deferred=now("waiting_deferred"),
        kv_usage=max(engine.newest["kv_usage"] for engine in engines),
        seconds=fmean(engine.seconds for engine in engines),
        running_mean=mean("running"),
        waiting_mean=mean("waiting"),
        deferred_mean=mean("waiting_deferred"),
        kv_usage_mean=mean("kv_usage") / len(engines),
        busy_mean=fmean(engine.busy() for engine in engines),
        generated_per_s=rate("generated"),
        prompted_per_s=rate("prompted"),
        computed_per_s=rate("computed"),
        preemptions_per_s=rate("preemptions"),
        prefix_hit_rate=fraction("prefix_hits", "prefix_queries"),
        external_hit_rate=fraction("external_hits", "external_queries"),
        acceptance_rate=fraction("accepted", "drafted"),
    )
