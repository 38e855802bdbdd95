"""What evaluations leave in a run directory: `evaluations/step-000050/`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from primeslurm.base import files
from primeslurm.records.metrics import EVALUATION, Row
from primeslurm.records.reading import find_record

DIRECTORY = "evaluations"
SUMMARY = "summary.json"
"""Written last: with it an evaluation is done."""
_NAME = re.compile(r"^step-(\d{6,})$")


class Estimated(msgspec.Struct, frozen=True):
    """A mean over examples with its standard error."""

    value: float
    stderr: float | None = None
    """None with a single example."""

    def __str__(self) -> str:
        """Write it as 0.812 ± 0.021."""
        return f"{self.value:.3f}" + (f" ± {self.stderr:.3f}" if self.stderr is not None else "")


class LabelResult(msgspec.Struct, frozen=True):
    """What came out in one environment."""

    label: str
    examples: int
    samples: int
    """Of each example."""
    reward: Estimated
    pass_at: dict[int, Estimated]
    """k to the probability that one of k samples solves an example."""
    failed: float = 0.0
    """Share of the samples that ended with an error each time they were tried; their reward is 0."""
    truncated: float = 0.0
    """Share of the samples that were cut off at a limit of tokens."""
    length: float = 0.0
    """Sampled tokens of a sample, mean."""
    turns: float = 0.0
    """Of a sample, mean."""
    metrics: dict[str, float] = {}
    """The environment's own, mean over samples that have them."""

    @property
    def estimates(self) -> dict[str, Estimated]:
        """Return what has a standard error, by name: `reward_mean`, and `pass@<k>` of every k."""
        return {"reward_mean": self.reward, **{f"pass@{k}": each for k, each in self.pass_at.items()}}

    def metric(self, name: str) -> float | None:
        """Return one of `estimates`; None if it was not measured."""
        found = self.estimates.get(name)
        return found.value if found else None

    @property
    def words(self) -> str:
        """Write the mean reward, pass@k of the largest k, and how many samples failed."""
        k = max(self.pass_at, default=1)
        parts = [f"{self.label} {self.reward}", *([f"pass@{k} {self.pass_at[k]}"] if k > 1 else [])]
        return ", ".join([*parts, *([f"{self.failed:.0%} failed"] if self.failed else [])])

    def row(self) -> Row:
        """Return all that was measured, by name."""
        row = {name: float(getattr(self, name)) for name in ("failed", "truncated", "length", "turns")}
        for name, each in self.estimates.items():
            row[name] = each.value
            if each.stderr is not None:
                row[f"{name.removesuffix('_mean')}_stderr"] = each.stderr
        return row | {f"metrics/{name}": value for name, value in self.metrics.items()}


class EvaluationRecord(msgspec.Struct, frozen=True):
    """One finished evaluation: `summary.json`."""

    step: int
    """The step that was to be evaluated: 0 for the model as it was."""
    version: int
    """Policy version that the engines had when it began."""
    oldest_version: int
    """Policy versions that sampled tokens."""
    newest_version: int
    time: float
    """When it was done, in Unix seconds."""
    seconds: float
    """From its beginning, time without an orchestrator included."""
    results: list[LabelResult] = []

    def result(self, label: str) -> LabelResult | None:
        """Return what came out in an environment."""
        return next((result for result in self.results if result.label == label), None)

    def metric(self, name: str) -> float | None:
        """Return the metric `<label>/<name>`; None if it was not measured."""
        label, _, metric = name.partition("/")
        found = self.result(label)
        return found.metric(metric) if found else None

    def row(self) -> Row:
        """Return all that was measured as metrics of its step."""
        row: Row = {
            f"{EVALUATION}version_min": float(self.oldest_version),
            f"{EVALUATION}version_max": float(self.newest_version),
            f"{EVALUATION}seconds": self.seconds,
        }
        for result in self.results:
            row |= {f"{EVALUATION}{result.label}/{name}": value for name, value in result.row().items()}
        return row


class BestCheckpoint(msgspec.Struct, frozen=True):
    """The step whose evaluation was the best so far; its checkpoint is kept."""

    step: int
    metric: str
    """`<label>/<reward_mean or pass@k>`."""
    value: float


class EvaluationProgress(msgspec.Struct, frozen=True):
    """How far evaluation is, in the orchestrator's words."""

    step: int | None = None
    """Of the evaluation that runs; None if there is none."""
    ended: int = 0
    """Samples of it that have ended."""
    total: int = 0
    inflight: int = 0
    last: EvaluationRecord | None = None
    """The newest that is done."""
    best: BestCheckpoint | None = None


def step_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of the evaluation of a step."""
    return run_dir / DIRECTORY / f"step-{step:06d}"


def steps(run_dir: Path) -> list[int]:
    """List the steps that have a directory, ascending; their evaluation may not be done."""
    directories = files.settled_listing(run_dir / DIRECTORY)
    return sorted(int(match[1]) for path in directories if (match := _NAME.match(path.name)))


def evaluations(run_dir: Path) -> list[EvaluationRecord]:
    """Read all evaluations that are done, by step."""
    found = (find_record(step_dir(run_dir, step) / SUMMARY, EvaluationRecord) for step in steps(run_dir))
    return [record for record in found if record is not None]


def best_of(records: list[EvaluationRecord], metric: str) -> BestCheckpoint | None:
    """Find the step with the highest value of a metric, the first of several; the model as it was is no checkpoint."""
    best: BestCheckpoint | None = None
    for record in records:
        value = record.metric(metric)
        if record.step and value is not None and (best is None or value > best.value):
            best = BestCheckpoint(record.step, metric, value)
    return best
