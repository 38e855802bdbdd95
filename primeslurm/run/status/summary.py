"""Summary of a run: rewards, losses, throughput and failures, from its metrics and events."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from math import inf, isnan
from statistics import fmean

import msgspec

from primeslurm.base.errors import RunError, signature
from primeslurm.records.attempt import FIRST_STEP
from primeslurm.records.evaluation import BestCheckpoint, EvaluationRecord, best_of, evaluations
from primeslurm.records.events.processes import ProcessStarted
from primeslurm.records.events.training import RolloutFailed, TaskGivenUp
from primeslurm.records.metrics import Row
from primeslurm.records.record import Event
from primeslurm.records.state import FailedRollouts
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from primeslurm.run.status.plan_outline import PlanOutline, read_outline

# Steps averaged at the start and at the end of the run. Of a shorter run, each window is at most half.
WINDOW = 5


class Summary(msgspec.Struct, frozen=True):
    """Results of one run. Rewards and losses are means over the first and the last five steps, or fewer."""

    run: str
    steps: int
    attempts: int
    seconds: float
    first_reward: float | None
    last_reward: float | None
    mixed_version_rollouts: int
    staleness_max: float
    dropped_stale: int
    mismatch_kl_max: float | None  # largest KL divergence between trainer and engines on tokens of the trained policy
    engine_restarts: int
    tokens_per_s: float  # tokens per second that the engines sampled
    failures: dict[str, FailedRollouts] = {}  # failed rollouts of all attempts, by environment
    task: str = "rl"
    first_loss: float | None = None
    last_loss: float | None = None
    trained_tokens_per_s: float = 0.0  # tokens per second while the trainer trains
    evaluations: list[EvaluationRecord] = []
    best: BestCheckpoint | None = None  # best evaluation by the metric that the recipe names
    emulated: bool = False  # all numbers come from stand-ins
    gpu_hours: dict[str, float] = {}
    """GPU-hours of the trained steps, by role: trainer, engine, prefill, decode. Empty on a site without GPUs."""
    idle_fraction: dict[str, float] = {}  # fraction of these GPU-hours in which GPUs had nothing to do, by role
    mfu: float | None = None  # mean model FLOPs utilization of the trainer; None if it is unknown
    first_step_seconds: float | None = None  # seconds from the start of the first job to its first step

    @property
    def gain(self) -> float | None:
        """Increase of the mean reward; None without rewards."""
        if self.first_reward is None or self.last_reward is None:
            return None
        return self.last_reward - self.first_reward


def _ends(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return the means over the first and the last steps. None without steps."""
    window = max(1, min(WINDOW, len(values) // 2))
    return (fmean(values[:window]), fmean(values[-window:])) if values else (None, None)


def _failures(happened: Sequence[Event]) -> dict[str, FailedRollouts]:
    failed: dict[str, Counter[str]] = {}
    given_up = Counter[str]()
    examples: dict[str, str] = {}
    for event in happened:
        if isinstance(event, RolloutFailed) and event.environment:
            kind = signature(event.error)
            failed.setdefault(event.environment, Counter())[kind] += 1
            examples[kind] = event.error
        elif isinstance(event, TaskGivenUp):
            failed.setdefault(event.environment, Counter())
            given_up[event.environment] += 1
            examples[event.environment] = event.reason
    failures = {}
    for label, kinds in failed.items():
        kind, of_reason = max(kinds.items(), key=lambda item: item[1], default=(label, 0))
        failures[label] = FailedRollouts(kinds.total(), of_reason, examples[kind], given_up[label])
    return failures


def summarise(run: RunDirectory) -> Summary:
    steps = rows(run.path)
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row]
    losses = [row["trainer/loss"] for row in steps if "trainer/loss" in row]
    mismatches = [row["trainer/mismatch_kl"] for row in steps if "trainer/mismatch_kl" in row]
    happened = events(run)
    recipe = run.recipe()
    evaluated = evaluations(run.path)
    keep_best = recipe.evaluation.keep_best if recipe.evaluation else None
    restarts = sum(isinstance(event, ProcessStarted) and event.restarts > 0 for event in happened)
    outline = _outline(run)
    has_gpus = outline is None or outline.device == "cuda"
    gpu_hours = _of_roles(steps, "gpu_hours") if has_gpus else {}
    created = run.created_at or (steps[0]["time"] if steps else 0.0)
    return Summary(
        run=run.name,
        steps=len(steps),
        attempts=len(run.attempts()),
        seconds=(happened[-1].time - created) if happened else 0.0,
        first_reward=_ends(rewards)[0],
        last_reward=_ends(rewards)[1],
        mixed_version_rollouts=round(sum(row.get("rollouts/mixed_version", 0) for row in steps)),
        staleness_max=max((row.get("staleness/max", 0.0) for row in steps), default=0.0),
        dropped_stale=round(sum(row.get("rollouts/dropped_stale", 0) for row in steps)),
        mismatch_kl_max=max((inf if isnan(kl) else abs(kl) for kl in mismatches), default=None),
        engine_restarts=restarts,
        tokens_per_s=fmean([row.get("throughput/tokens_per_s", 0.0) for row in steps] or [0.0]),
        failures=_failures(happened),
        task=recipe.task,
        first_loss=_ends(losses)[0],
        last_loss=_ends(losses)[1],
        trained_tokens_per_s=fmean([row.get("trainer/tokens_per_s", 0.0) for row in steps] or [0.0]),
        evaluations=evaluated,
        best=best_of(evaluated, keep_best) if keep_best else None,
        emulated=outline is not None and outline.emulated,
        gpu_hours={role: sum(hours) for role, hours in gpu_hours.items()},
        idle_fraction={role: _idle(steps, role) for role in gpu_hours},
        mfu=fmean(used) if (used := [row["trainer/mfu"] for row in steps if "trainer/mfu" in row]) else None,
        first_step_seconds=next((row[FIRST_STEP] for row in steps if FIRST_STEP in row), None),
    )


def _of_roles(steps: Sequence[Row], name: str) -> dict[str, list[float]]:
    """Return the values of a metric that every role has, by role."""
    values: dict[str, list[float]] = {}
    for row in steps:
        for metric, value in row.items():
            *prefix, last = metric.split("/")
            if last == name and prefix and prefix[0] in ("trainer", "engines"):
                values.setdefault(prefix[-1], []).append(value)
    return values


def _idle(steps: Sequence[Row], role: str) -> float:
    """Return the idle fraction of a role, weighted by GPU-hours."""
    prefix = "trainer" if role == "trainer" else f"engines/{role}"
    hours = [(row.get(f"{prefix}/gpu_hours", 0.0), row.get(f"{prefix}/idle_fraction", 0.0)) for row in steps]
    total = sum(spent for spent, _ in hours)
    return sum(spent * idle for spent, idle in hours) / total if total else 0.0


def _outline(run: RunDirectory) -> PlanOutline | None:
    # A run may have no attempt, or a plan that cannot be read.
    with contextlib.suppress(RunError):
        return read_outline(run.latest())
    return None
