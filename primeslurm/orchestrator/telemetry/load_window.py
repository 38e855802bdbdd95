"""From samples of single engines to the load of roles and replicas: a sliding window. Pure; the caller's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from primeslurm.orchestrator.telemetry.engine_metrics import COUNTERS, ENGINE, GAUGES, Sample
from primeslurm.records.state import Load

WINDOW_S = 60.0
"""Means and rates go this far back: a policy update, during which nothing runs, should not look like a trend."""


class _Engine:
    """One engine's recent samples, and its counters made monotonic over restarts."""

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

    def grown(self, name: str) -> float:
        return self.samples[-1][1][name] - self.samples[0][1][name]


class LoadWindow:
    """Samples of all engines over the last minute."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._engines: dict[str, _Engine] = {}
        self._answered: set[str] = set()

    def add(self, now: float, samples: Mapping[str, Sample]) -> None:
        """Take in one look at all engines; `now` in seconds. Engines that are missing from it did not answer."""
        self._answered = set(samples)
        for name, sample in samples.items():
            self._engines.setdefault(name, _Engine()).add(now, sample, self._window_s)

    @property
    def tokens(self) -> float:
        """Return how many tokens engines were seen to read and to generate; it never falls."""
        return sum(engine.tokens for engine in self._engines.values())

    def by_role(self) -> dict[str, Load]:
        """Return the load of each role."""
        return {role: _sum(engines) for (role,), engines in self._grouped("role").items()}

    def by_replica(self) -> dict[str, dict[str, Load]]:
        """Return the load of each role of each inference replica, by the replica's index."""
        found: dict[str, dict[str, Load]] = {}
        for (replica, role), engines in self._grouped("replica", "role").items():
            found.setdefault(replica, {})[role] = _sum(engines)
        return found

    def _grouped(self, *keys: str) -> dict[tuple[str, ...], list[_Engine]]:
        groups: dict[tuple[str, ...], list[_Engine]] = {}
        for name in sorted(self._answered):
            if match := ENGINE.match(name):
                groups.setdefault(tuple(match[key] for key in keys), []).append(self._engines[name])
        return groups


def rounded(loads: Mapping[str, Load]) -> dict[str, Load]:
    """Round values to what a reader of a state file can use."""
    return {name: Load(*(_rounded(value) for value in msgspec.structs.astuple(load))) for name, load in loads.items()}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _sum(engines: Sequence[_Engine]) -> Load:
    def now(name: str) -> float:
        return sum(engine.newest[name] for engine in engines)

    def mean(name: str) -> float:
        return sum(engine.mean(name) for engine in engines)

    def rate(name: str) -> float:
        return sum(engine.grown(name) / engine.seconds for engine in engines if engine.seconds)

    def share(hits: str, queries: str) -> float | None:
        asked = sum(engine.grown(queries) for engine in engines)
        return sum(engine.grown(hits) for engine in engines) / asked if asked else None

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
        prefix_hit_rate=share("prefix_hits", "prefix_queries"),
        external_hit_rate=share("external_hits", "external_queries"),
    )
