"""Definitions of the charts, and their data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from primeslurm.dashboard.metric_table import Columns, MetricTable, spread
from primeslurm.records.monitors import EVALUATION

# Most points of a chart, about as many as it has pixels.
POINTS = 600
# Section of the metrics that no chart of `_CHARTS` shows.
OTHER = "Other metrics"
_ROLES = ("engine", "prefill", "decode")
# First parts of metric names that are no label of an environment.
_OWN = frozenset(
    {
        *("reward", "groups", "env", "length_penalty", "memory", "trainer", "staleness", "rollouts", "router_replay"),
        *("teacher", "throughput", "policy", "queue", "engines", "eval"),
    }
)


class ChartSpec(NamedTuple):
    """Lines that are drawn together."""

    section: str
    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]  # (label, metric)
    log: bool = False  # logarithmic values
    stacked: bool = False  # the lines are parts of a whole
    evaluation: bool = False  # metrics of evaluations, which have fewer steps


_CHARTS = (
    ChartSpec("Learning", "Reward", "mean of the batch", (("mean", "reward/mean"), ("std. deviation", "reward/std"))),
    ChartSpec("Learning", "KL", "nats per token",
              (("same policy", "trainer/mismatch_kl"), ("off policy", "trainer/off_policy_kl"),
               ("to the reference", "trainer/ref_kl"), ("to the teacher", "teacher/kl")), log=True),
    ChartSpec("Learning", "Entropy", "nats per token", (("entropy", "trainer/entropy"),)),
    ChartSpec("Learning", "Loss", "per token", (("loss", "trainer/loss"),)),
    ChartSpec("Learning", "Gradient norm", "before clipping", (("norm", "trainer/grad_norm"),)),
    ChartSpec("Learning", "Groups without signal", "fraction", (("all rewards equal", "groups/zero_signal"),)),
    ChartSpec("Rollouts", "Staleness", "policy versions",
              (("mean", "staleness/mean"), ("largest", "staleness/max"),
               ("oldest token", "staleness/oldest_token_max"))),
    ChartSpec("Rollouts", "Length", "tokens",
              (("sampled", "rollouts/sampled_mean"), ("whole", "rollouts/length_mean"))),
    ChartSpec("Rollouts", "Turns", "per rollout", (("turns", "rollouts/turns_mean"),)),
    ChartSpec("Rollouts", "Truncated", "fraction",
              (("at a token limit", "rollouts/cut_off"), ("to seq_len", "rollouts/longer_than_seq_len"))),
    ChartSpec("Rollouts", "Lost rollouts", "per step",
              (("too old", "rollouts/dropped_stale"), ("failed", "rollouts/failed"), ("lost", "rollouts/lost"),
               ("mixed version (kept)", "rollouts/mixed_version"))),
    ChartSpec("Rollouts", "Time of a rollout", "s", (("mean", "rollouts/seconds_mean"),)),
    ChartSpec("Speed", "Parts of a step", "s in the trainer",
              (("waiting for a batch", "trainer/seconds/wait"),
               ("forward and backward", "trainer/seconds/forward_backward"),
               ("optimizer", "trainer/seconds/optimizer"), ("publishing weights", "trainer/seconds/publish"),
               ("snapshot", "trainer/seconds/snapshot"), ("checkpoint", "trainer/seconds/checkpoint")), stacked=True),
    ChartSpec("Speed", "Time of a step", "s", (("step", "throughput/step_seconds"),)),
    ChartSpec("Speed", "Tokens", "per second",
              (("sampled", "throughput/tokens_per_s"), ("trained, while training", "trainer/tokens_per_s"))),
    ChartSpec("Speed", "Model FLOPs utilization", "fraction", (("MFU", "trainer/mfu"),)),
    ChartSpec("Speed", "Computation", "TFLOP/s per GPU", (("model FLOPs", "trainer/tflops_per_gpu"),)),
    ChartSpec("Speed", "Idle time", "fraction",
              (("trainer", "trainer/idle_fraction"), *((role, f"engines/{role}/idle_fraction") for role in _ROLES))),
    ChartSpec("Speed", "Weight update", "s", (("all engines current", "policy/update_seconds"),)),
    ChartSpec("Queues", "Rollouts in flight", "rollouts", (("in flight", "queue/inflight"),)),
    ChartSpec("Queues", "Groups", "groups", (("ready", "queue/ready_groups"), ("open", "queue/open_groups"))),
)  # fmt: skip
_OF_ENGINES = (
    ("KV cache in use", "fraction", "kv_usage_mean"),
    ("Running requests", "per engine", "running_mean"),
    ("Waiting requests", "per engine", "waiting_mean"),
    ("Prefix cache hits", "fraction of prompt tokens", "prefix_hit_rate"),
    ("Sampled by engines", "tokens/s", "generated_per_s"),
)
_ENGINE_CHARTS = tuple(
    ChartSpec("Engines", title, unit, tuple((role, f"engines/{role}/{name}") for role in _ROLES))
    for title, unit, name in _OF_ENGINES
)


def specs(trained: Collection[str], evaluated: Collection[str]) -> list[ChartSpec]:
    """Return the charts for the metrics of training rows and of evaluation rows. Each metric is in a chart."""
    charts = [
        spec._replace(lines=tuple(line for line in spec.lines if line[1] in trained))
        for spec in (*_CHARTS, *_ENGINE_CHARTS)
    ]
    rewards = _environment_rewards(trained)
    if len(rewards) > 1:  # with one environment, it equals the mean
        charts.insert(1, ChartSpec("Learning", "Reward per environment", "mean of the batch", rewards))
    charts += _evaluation_charts(evaluated)
    charts = [spec for spec in charts if spec.lines]
    shown = {metric for spec in charts for _, metric in spec.lines}
    rest = [ChartSpec(OTHER, name, "", ((name, name),)) for name in sorted(set(trained) - shown)]
    rest += [ChartSpec(OTHER, name, "", ((name, name),), evaluation=True) for name in sorted(set(evaluated) - shown)]
    return charts + rest


def chart_data(table: MetricTable, specs: Iterable[ChartSpec], points: int = POINTS) -> list[dict[str, Any]]:
    """Return charts with their values, as the browser draws them.

    Returns:
        For each chart its fields, at most about `points` `steps` with their `times` [Unix s], and a list of `values`
        for each line. A missing value is None.
    """
    with table.lock:
        return [_data(table.evaluated if spec.evaluation else table.trained, spec, points) for spec in specs]


def curves(table: MetricTable, *, other: bool, points: int = POINTS) -> dict[str, Any]:
    """Return the charts of the section `Other metrics`, or all others, with the state of the table."""
    with table.lock:
        every = specs(table.trained.metrics, table.evaluated.metrics)
        chosen = [spec for spec in every if (spec.section == OTHER) == other]
        return {
            "rows": table.trained.rows,
            "generation": table.generation,
            "other": sum(spec.section == OTHER for spec in every),
            "charts": chart_data(table, chosen, points),
        }


def _environment_rewards(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    found = (name for name in names if name.endswith("/reward") and name.split("/")[0] not in _OWN)
    return tuple((name.removesuffix("/reward"), name) for name in sorted(found))


def _evaluation_charts(names: Collection[str]) -> list[ChartSpec]:
    labels = sorted(name[len(EVALUATION) : -len("/reward_mean")] for name in names if name.endswith("/reward_mean"))
    charts = []
    for label in labels:
        prefix = f"{EVALUATION}{label}/"
        passes = sorted(
            (name for name in names if name.startswith(f"{prefix}pass@") and not name.endswith("_stderr")), key=_k
        )
        more = [(name.removeprefix(prefix), name) for name in passes if _k(name) > 1]
        lines = (("reward", f"{prefix}reward_mean"), *more)
        charts.append(ChartSpec("Evaluations", label, "mean over examples", lines, evaluation=True))
    return charts


def _k(name: str) -> int:
    k = name.rpartition("@")[2]
    return int(k) if k.isdecimal() else 0


def _data(columns: Columns, spec: ChartSpec, points: int) -> dict[str, Any]:
    values = [columns.values(metric) for _, metric in spec.lines]
    present = np.flatnonzero(np.any([np.isfinite(each) for each in values], axis=0))
    values = [each[present] for each in values]
    chosen = spread(len(present), values, points)
    steps, times = (columns.values(name)[present][chosen] for name in ("step", "time"))
    return {
        **spec._asdict(),
        "lines": [{"label": label, "metric": metric} for label, metric in spec.lines],
        "steps": steps.astype(int).tolist(),
        "times": _numbers(times.tolist()),
        "values": [_numbers(each[chosen].tolist()) for each in values],
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    # Seven digits halve the size of the answer. Times keep their tenths of a second.
    return [(round(v, 1) if abs(v) > 1e7 else float(f"{v:.7g}")) if isfinite(v) else None for v in values]
