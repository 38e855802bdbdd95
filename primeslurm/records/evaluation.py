"""Results of evaluations in a run directory: `evaluations/step-000050/`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.records.metrics import Row
from primeslurm.records.monitors import EVALUATION
from primeslurm.records.reading import find_record

DIRECTORY = "evaluations"
# Written last: an evaluation with this file is complete.
SUMMARY = "summary.json"
_NAME = re.compile(r"^step-(\d{6,})$")


class Estimated(msgspec.Struct, frozen=True):
    """A mean over examples with its standard error."""

    value: float
    stderr: float | None = None  # None with a single example

    def __str__(self) -> str:
        """Format as 0.812 ± 0.021."""
        return f"{self.value:.3f}" + (f" ± {self.stderr:.3f}" if self.stderr is not None else "")


class LabelResult(msgspec.Struct, frozen=True):
    """Results of one environment."""

    label: str
    examples: int
    samples: int  # per example
    reward: Estimated
    pass_at: dict[int, Estimated]  # k to the probability that one of k samples solves an example
    failed: float = 0.0  # fraction of samples that failed in every try; their reward is 0
    truncated: float = 0.0  # fraction of samples cut off at a token limit
    length: float = 0.0  # sampled tokens per sample, mean
    turns: float = 0.0  # turns per sample, mean
    metrics: dict[str, float] = {}  # the environment's metrics, mean over the samples that have them

    @property
    def estimates(self) -> dict[str, Estimated]:
        """Results with a standard error, by name: `reward_mean`, and `pass@<k>` for every k."""
        return {"reward_mean": self.reward, **{f"pass@{k}": each for k, each in self.pass_at.items()}}

    @property
    def words(self) -> str:
        k = max(self.pass_at, default=1)
        parts = [f"{self.label} {self.reward}", *([f"pass@{k} {self.pass_at[k]}"] if k > 1 else [])]
        return ", ".join([*parts, *([f"{self.failed:.0%} failed"] if self.failed else [])])

    def row(self) -> Row:
        row = {name: float(getattr(self, name)) for name in ("failed", "truncated", "length", "turns")}
        for name, each in self.estimates.items():
            row[name] = each.value
            if each.stderr is not None:
                row[f"{name.removesuffix('_mean')}_stderr"] = each.stderr
        return row | {f"metrics/{name}": value for name, value in self.metrics.items()}


class EvaluationRecord(msgspec.Struct, frozen=True):
    """`summary.json` of a complete evaluation."""

    step: int  # the evaluated step; 0 for the original model
    version: int  # policy version of the engines at its start
    oldest_version: int  # range of the policy versions that sampled tokens
    newest_version: int
    time: float  # its end, in Unix seconds
    seconds: float  # from start to end, time without an orchestrator included
    results: list[LabelResult] = []

    def result(self, label: str) -> LabelResult | None:
        return next((result for result in self.results if result.label == label), None)

    def metric(self, name: str) -> float | None:
        label, _, metric = name.partition("/")
        result = self.result(label)
        estimate = result.estimates.get(metric) if result else None
        return estimate.value if estimate else None

    def row(self) -> Row:
        row: Row = {
            f"{EVALUATION}version_min": float(self.oldest_version),
            f"{EVALUATION}version_max": float(self.newest_version),
            f"{EVALUATION}seconds": self.seconds,
        }
        for result in self.results:
            row |= {f"{EVALUATION}{result.label}/{name}": value for name, value in result.row().items()}
        return row


class BestCheckpoint(msgspec.Struct, frozen=True):
    """The step with the best evaluation so far. Its checkpoint is kept."""

    step: int
    metric: str  # `<label>/<reward_mean or pass@k>`
    value: float


class EvaluationProgress(msgspec.Struct, frozen=True):
    """Progress of the running evaluation."""

    step: int | None = None  # evaluated step; None if no evaluation runs
    ended: int = 0  # samples that have ended, of `total`
    total: int = 0
    inflight: int = 0
    last: EvaluationRecord | None = None  # the newest complete evaluation
    best: BestCheckpoint | None = None


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / DIRECTORY / f"step-{step:06d}"


def steps(run_dir: Path) -> list[int]:
    directories = files.settled_listing(run_dir / DIRECTORY)
    return sorted(int(match[1]) for path in directories if (match := _NAME.match(path.name)))


def evaluations(run_dir: Path) -> list[EvaluationRecord]:
    records = (find_record(step_dir(run_dir, step) / SUMMARY, EvaluationRecord) for step in steps(run_dir))
    return [record for record in records if record is not None]


def best_of(records: list[EvaluationRecord], metric: str) -> BestCheckpoint | None:
    """Return the first step with the highest value of a metric. Step 0 has no checkpoint and does not compete."""
    best: BestCheckpoint | None = None
    for record in records:
        value = record.metric(metric)
        if record.step and value is not None and (best is None or value > best.value):
            best = BestCheckpoint(record.step, metric, value)
    return best
