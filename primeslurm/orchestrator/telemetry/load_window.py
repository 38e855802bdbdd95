"""Load of roles and replicas from samples of engines, over a sliding window. Pure: callers pass the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from primeslurm.orchestrator.telemetry.engine_metrics import COUNTERS, ENGINE, GAUGES, Sample
from primeslurm.records.state import Load

WINDOW_S = 60.0  # length of the window, long enough that a weight update does not look like a trend


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
    def round_value(value: Any) -> Any:
        return round(value, 4) if isinstance(value, float) else value

    return {name: Load(*map(round_value, msgspec.structs.astuple(load))) for name, load in loads.items()}


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
    )
