"""The metrics of a run for Prometheus: newest rows of metrics.jsonl, sums over all rows, states of processes."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from primeslurm.plan.model import Plan
from primeslurm.records.fleet import FleetView
from primeslurm.records.growing_file import GrowingFile
from primeslurm.records.metrics import FILE, Row, is_evaluation, parse_row, with_rl_names

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "primeslurm_"
# First parts of metric names. A metric with another first part was reported by the environment of that name.
COMPONENTS = frozenset(
    {
        *("reward", "groups", "length_penalty", "trainer", "staleness", "rollouts", "router_replay", "teacher"),
        *("throughput", "policy", "queue"),
    }
)
# Metrics that the exporter adds to those of rows.
INFO, ATTEMPT, PROCESSES = f"{PREFIX}run_info", f"{PREFIX}attempt", f"{PREFIX}processes"
STEP, STEP_TIME = f"{PREFIX}step", f"{PREFIX}step_timestamp_seconds"
GPU_HOURS, TRAINED_TOKENS = f"{PREFIX}gpu_hours_total", f"{PREFIX}trained_tokens_total"
_OTHER = re.compile(r"[^a-zA-Z0-9_]")


def labelled(name: str) -> tuple[str, dict[str, str]]:
    """Return the Prometheus name and the labels of a metric of a row."""
    match name.split("/"):
        case ["engines", role, *rest] if rest:
            family, labels = ["engines", *rest], {"role": role}
        case ["env" | "eval" as kind, environment, *rest] if rest:
            family, labels = [kind], {"environment": environment, "metric": "/".join(rest)}
        case ["memory", *rest]:
            family, labels = ["memory"], {"metric": "/".join(rest)}
        case [component, *_] as parts if component in COMPONENTS or component == "eval":
            family, labels = parts, {}
        case [environment, *rest]:
            family, labels = ["environment"], {"environment": environment, "metric": "/".join(rest)}
    return PREFIX + _OTHER.sub("_", "_".join(family)), labels


class RunCollector:
    """Reads a run's metrics at each scrape. A collector of prometheus_client.

    Args:
        view: returns what the head published last.
    """

    def __init__(self, plan: Plan, attempt: int, view: Callable[[], FleetView]) -> None:
        self._plan, self._attempt, self._view = plan, attempt, view
        self._rows = _Rows(Path(plan.run_dir) / FILE)
        self._lock = threading.Lock()
        self._roles = {process.name: process.role for process in plan.processes()}

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Return all metrics. Every one has the label `run`."""
        with self._lock:  # each scrape has its own thread, and two must not count the same rows
            self._rows.refresh()
            return list(self._metrics())

    def _metrics(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        run = self._plan.run
        yield _gauge(INFO, "The run.", {"run": run, "task": self._plan.task}, 1)
        yield _gauge(ATTEMPT, "Number of the attempt.", {"run": run}, self._attempt)
        processes = GaugeMetricFamily(PROCESSES, "Processes by role and state.", labels=["run", "role", "state"])
        states = Counter((self._roles.get(name, ""), state) for name, state in self._view().states.items())
        for (role, state), count in sorted(states.items()):
            processes.add_metric([run, role, state], count)
        yield processes
        if self._rows.newest:
            yield _gauge(STEP, "Last trained step.", {"run": run}, self._rows.newest["step"])
            yield _gauge(STEP_TIME, "Time of the last trained step.", {"run": run}, self._rows.newest.get("time", 0))
        yield from _families(run, self._rows.newest | self._rows.evaluations)
        hours = CounterMetricFamily(GPU_HOURS, "GPU-hours of all trained steps.", labels=["run", "role"])
        for role, value in sorted(self._rows.gpu_hours.items()):
            hours.add_metric([run, role], value)
        yield hours
        tokens = CounterMetricFamily(TRAINED_TOKENS, "Trained tokens of all steps.", labels=["run"])
        tokens.add_metric([run], self._rows.tokens)
        yield tokens


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _families(run: str, row: Row) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a row, those of the same name together."""
    from prometheus_client.core import GaugeMetricFamily

    families: dict[str, GaugeMetricFamily] = {}
    for name, value in row.items():
        if name in ("step", "time"):
            continue
        family, labels = labelled(name)
        if family not in families:
            text = f"See docs/reference/metrics.md: {name}" if not labels else "See docs/reference/metrics.md."
            families[family] = GaugeMetricFamily(family, text, labels=["run", *labels])
        families[family].add_metric([run, *labels.values()], value)
    yield from families.values()


class _Rows:
    """The end of metrics.jsonl, and sums over all of it. Each line is read once."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._reset()

    def _reset(self) -> None:
        self.newest: Row = {}
        self.evaluations: Row = {}
        self.gpu_hours: dict[str, float] = defaultdict(float)
        self.tokens = 0.0

    def refresh(self) -> None:
        """Read the new lines. When a run resumes, its file is replaced, and all of it is read again."""
        complete = False
        while not complete:
            try:
                lines, replaced, complete = self._file.appended()
            except OSError:
                return
            if replaced:
                self._reset()
            for row in filter(None, map(parse_row, lines)):
                self._add(row)

    def _add(self, row: Row) -> None:
        if is_evaluation(row):
            self.evaluations |= {name: value for name, value in row.items() if name not in ("step", "time")}
            return
        self.newest = row = with_rl_names(row)
        self.tokens += row.get("trainer/tokens", 0.0)
        for name, value in row.items():
            *prefix, last = name.split("/")
            if last == "gpu_hours":
                self.gpu_hours[prefix[-1]] += value
