"""One self-contained HTML page about a run: numbers, plots, attempts, placement. It needs no network and no scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from primeslurm.base.templating import environment
from primeslurm.base.units import count, duration, number
from primeslurm.plan.model import Node, Plan
from primeslurm.records.attempt import LockRecord
from primeslurm.records.evaluation import EvaluationRecord
from primeslurm.records.fleet import outcome_text
from primeslurm.records.metrics import Row
from primeslurm.records.monitors import EVALUATION
from primeslurm.run.diagnosis.validity import problems
from primeslurm.run.directory import Attempt, RunDirectory
from primeslurm.run.records import attempt_events, dropped_rollouts, rows
from primeslurm.run.report import charts
from primeslurm.run.report.charts import Chart, Tick, chart
from primeslurm.run.status.event_text import EventText, notable
from primeslurm.run.status.run_status import EMULATED, JobQuery, RunStatus, read_status
from primeslurm.run.status.summary import Summary, summarise

MAX_EVENTS = 200
BAR_WIDTH, BAR_LEFT, BAR_HEIGHT = 1140, 90, 30

_CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...], bool], ...] = (
    ("Reward", "mean of the batch", (("mean", "reward/mean"), ("standard deviation", "reward/std")), False),
    (
        "Staleness",
        "policy versions",
        (
            ("mean", "staleness/mean"),
            ("largest", "staleness/max"),
            ("oldest token", "staleness/oldest_token_max"),
        ),
        False,
    ),
    ("Sampled tokens", "tokens/s", (("engines", "throughput/tokens_per_s"),), False),
    ("Trained tokens", "tokens/s while training", (("trainer", "trainer/tokens_per_s"),), False),
    (
        "Time of a step",
        "s",
        (
            ("step", "throughput/step_seconds"),
            ("waiting for a batch", "trainer/seconds/wait"),
            ("forward and backward", "trainer/seconds/forward_backward"),
            ("checkpoint", "trainer/seconds/checkpoint"),
        ),
        False,
    ),
    (
        "Policy update",
        "s",
        (("all engines current", "policy/update_seconds"), ("publishing weights", "trainer/seconds/publish")),
        False,
    ),
    ("Queues", "groups", (("ready", "queue/ready_groups"), ("open", "queue/open_groups")), False),
    ("In flight", "rollouts", (("in flight", "queue/inflight"),), False),
    (
        "Lost rollouts",
        "rollouts per step",
        (
            ("too old", "rollouts/dropped_stale"),
            ("failed", "rollouts/failed"),
            ("lost", "rollouts/lost"),
            ("mixed version (kept)", "rollouts/mixed_version"),
        ),
        False,
    ),
    (
        "KL",
        "nats per token",
        (
            ("same policy, trainer to engines", "trainer/mismatch_kl"),
            ("off policy", "trainer/off_policy_kl"),
            ("policy to teacher", "teacher/kl"),
        ),
        True,
    ),
    ("Loss", "per token", (("loss", "trainer/loss"),), False),
    ("Entropy", "nats per token", (("entropy", "trainer/entropy"),), False),
    ("Gradient norm", "", (("before clipping", "trainer/grad_norm"),), False),
    ("Rollout length", "tokens", (("sampled", "rollouts/sampled_mean"), ("total", "rollouts/length_mean")), False),
)
_ROLES = ("engine", "prefill", "decode")
_ENGINE_CHARTS = (
    ("KV cache in use", "share", "kv_usage_mean"),
    ("Waiting requests", "requests", "waiting_mean"),
    ("Running requests", "requests", "running_mean"),
    ("Prefix cache", "share of prompt tokens from the cache", "prefix_hit_rate"),
)


@dataclass(frozen=True)
class Mark:
    """An event on an attempt's bar."""

    x: float
    title: str
    level: str


@dataclass(frozen=True)
class Bar:
    """One attempt on the time line, in pixels."""

    label: str
    x: float
    width: float
    y: float
    outcome: str
    title: str
    marks: list[Mark]


@dataclass(frozen=True)
class Timeline:
    """All attempts over time."""

    bars: list[Bar]
    ticks: list[Tick]
    height: float


@dataclass(frozen=True)
class NodeRow:
    """A node of the plan, and what runs on it."""

    index: int
    role: str
    processes: str
    gpus: str
    """Their numbers; "-" for none."""


def report(run: RunDirectory, job_state: JobQuery, now: float) -> str:
    """Render the page.

    Args:
        run: the run.
        job_state: Slurm's word for a job.
        now: Unix seconds.

    Returns:
        The page as HTML.

    Raises:
        RunError: the run has no readable attempt.
    """
    status, steps, summary = read_status(run, job_state, now), rows(run.path), summarise(run)
    plan = run.latest().plan()
    told = [(attempt, notable(attempt_events(attempt))) for attempt in run.attempts()]
    templates = environment(autoescape=True)
    templates.filters |= {"clock": _clock, "duration": duration, "counted": count}
    return templates.get_template("report.html.j2").render(
        status=status,
        outcome=outcome_text(status.phase, status.reason),
        numbers=_numbers(status, summary, plan),
        emulated=EMULATED if status.emulated else "",
        invalid=problems(steps, dropped_rollouts(run.latest()), run.recipe().batch_size),
        charts=all_charts(steps) + evaluation_charts(summary.evaluations),
        evaluations=summary.evaluations,
        best=summary.best,
        size=charts,
        timeline=_timeline(told, now),
        events=[(attempt.number, event) for attempt, events in told for event in events][-MAX_EVENTS:],
        groups=plan.groups,
        nodes=[_node(node) for node in plan.nodes],
        lock=_lock(run.lock()),
        written=now,
    )


def all_charts(steps: Sequence[Row]) -> list[Chart]:
    """Draw every chart for which there are numbers."""
    found = [chart(title, unit, steps, series, log) for title, unit, series, log in _CHARTS]
    for title, unit, name in _ENGINE_CHARTS:
        found.append(chart(title, unit, steps, [(role, f"engines/{role}/{name}") for role in _ROLES]))
    return [each for each in found if each is not None]


def evaluation_charts(found: Sequence[EvaluationRecord]) -> list[Chart]:
    """Draw one chart for each environment of evaluation: mean reward, and pass@k of every k beyond 1."""
    table: list[Row] = [{"step": float(record.step), **record.row()} for record in found]
    charts_of = []
    for label in dict.fromkeys(result.label for record in found for result in record.results):
        known = {k for record in found if (result := record.result(label)) for k in result.pass_at if k > 1}
        series = [("reward", "reward_mean"), *((f"pass@{k}", f"pass@{k}") for k in sorted(known))]
        named = [(name, f"{EVALUATION}{label}/{metric}") for name, metric in series]
        charts_of.append(chart(f"Evaluation: {label}", "mean over examples", table, named))
    return [each for each in charts_of if each is not None]


def _numbers(status: RunStatus, summary: Summary, plan: Plan) -> list[tuple[str, str]]:
    reward = "-" if summary.last_reward is None else f"{summary.first_reward:.3f} → {summary.last_reward:.3f}"
    loss = "-" if summary.last_loss is None else f"{summary.first_loss:.4f} → {summary.last_loss:.4f}"
    kl = "-" if summary.mismatch_kl_max is None else f"{summary.mismatch_kl_max:.1e}"
    found = [
        ("steps", f"{summary.steps} of {status.max_steps}"),
        ("committed step", "-" if status.committed_step is None else str(status.committed_step)),
        ("reward, first → last steps", reward),
        ("loss, first → last steps", loss),
        ("largest staleness", f"{summary.staleness_max:.0f} versions"),
        ("dropped as too old", f"{number(summary.dropped_stale)} rollouts"),
        ("largest KL, same policy", kl),
        ("sampled", f"{number(summary.tokens_per_s)} tokens/s"),
        ("trained", f"{number(summary.trained_tokens_per_s)} tokens/s"),
        ("attempts", str(summary.attempts)),
        ("restarts in place", str(summary.engine_restarts)),
        ("time", duration(summary.seconds)),
        ("nodes", f"{plan.totals.nodes} ({plan.totals.inference_nodes} inference)"),
        ("GPUs", f"{plan.totals.gpus} ({plan.totals.trainer_gpus} trainer)"),
    ]
    of_others = {name for task, names in _OF_TASK.items() if task != status.task for name in names}
    return [each for each in found if each[0] not in of_others]


_OF_TASK = {
    "rl": (
        *("reward, first → last steps", "largest staleness", "dropped as too old"),
        *("largest KL, same policy", "sampled"),
    ),
    "sft": ("loss, first → last steps", "trained"),
}


def _timeline(told: Sequence[tuple[Attempt, list[EventText]]], now: float) -> Timeline:
    spans = [(attempt, *_span(attempt, events, now), events) for attempt, events in told]
    begin = min((start for _, start, _, _ in spans), default=now)
    end = max((stop for _, _, stop, _ in spans), default=now)

    def x(moment: float) -> float:
        return round(BAR_LEFT + (moment - begin) / ((end - begin) or 1.0) * (BAR_WIDTH - BAR_LEFT - 40), 1)

    bars = []
    for i, (attempt, start, stop, events) in enumerate(spans):
        record = attempt.end()
        outcome = record.outcome if record else "running"
        title = f"attempt {attempt.number}: {outcome_text(outcome, record.reason if record else '')}"
        marks = [Mark(x(event.time), f"{event.who} {event.text}", event.level) for event in events[-MAX_EVENTS:]]
        label, width = f"attempt {attempt.number}", max(2.0, x(stop) - x(start))
        bars.append(Bar(label, x(start), width, 8.0 + i * BAR_HEIGHT, outcome, title, marks))
    marks_at = charts.nice_marks(0.0, max((end - begin) / _unit(end - begin), 1e-3))
    ticks = [
        Tick(x(begin + mark * _unit(end - begin)), f"{mark:g} {'s' if _unit(end - begin) == 1 else 'min'}")
        for mark in marks_at
        if begin + mark * _unit(end - begin) <= end
    ]
    return Timeline(bars, ticks, 8.0 + BAR_HEIGHT * len(bars) + 24)


def _unit(seconds: float) -> float:
    return 1.0 if seconds < 180 else 60.0


def _span(attempt: Attempt, events: Sequence[EventText], now: float) -> tuple[float, float]:
    job, end = attempt.job(), attempt.end()
    start = events[0].time if events else (job.submitted_at if job else now)
    return start, end.time if end else now


def _node(node: Node) -> NodeRow:
    counts: dict[str, list[str]] = {}
    for process in node.processes:
        counts.setdefault(process.role, []).append(process.name)
    gpus = sorted({gpu for process in node.processes for gpu in process.gpus})
    return NodeRow(
        index=node.index,
        role=f"{node.role}[{node.index_in_group}]",
        processes=", ".join(_names(names) for names in counts.values()) or "-",
        gpus=",".join(map(str, gpus)) or "-",
    )


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def _lock(lock: LockRecord) -> list[tuple[str, str]]:
    named = {
        "run_id": lock.run_id,
        "git": lock.git,
        "python": lock.python,
        "recipe_hash": lock.recipe_hash,
        "plan_hash": lock.plan_hash,
    }
    return [(name, text) for name, text in {**named, **lock.packages}.items() if text]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "at an unknown time"
