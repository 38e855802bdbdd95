"""Results of an evaluation: its samples, their statistics, and their files.

Samples of the same example are alike, so only examples are independent draws. The standard error is therefore that of
the means of examples (clustered standard errors: Miller, "Adding Error Bars to Evals", 2024, section 2.2; the two are
equal for clusters of equal size).

Each evaluation has a directory, `evaluations/step-000050/`:

    progress.jsonl   while the evaluation runs: a header, then one line for each sample that has ended
    <label>.jsonl    in the end: one line for each example, with its samples
    summary.json     the results, written last

A sample counts once its line is written, so a restarted orchestrator continues with the samples in the file.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import Appender, write_atomic
from primeslurm.records import evaluation as records
from primeslurm.records.evaluation import Estimated, EvaluationRecord, LabelResult
from primeslurm.wire.decoding import DamagedError, decode_json

log = logging.getLogger(__name__)
PROGRESS = "progress.jsonl"


class Sample(msgspec.Struct, frozen=True):
    """One rollout of an evaluation that has ended."""

    label: str
    example: int
    sample: int
    reward: float = 0.0
    tokens: int = 0  # Number of sampled tokens
    turns: int = 0
    finish_reason: str = ""
    seconds: float = 0.0
    oldest_version: int = -1  # Oldest policy version that sampled a token; -1 if no token was sampled
    newest_version: int = -1
    metrics: dict[str, float] = {}
    error: str | None = None  # Error of the last try. The reward is then 0.


def estimate_mean(values: Sequence[float]) -> Estimated:
    """Return the mean of independent values, and its standard error s / sqrt(n), with s^2 over n - 1."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimated(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimated(mean, math.sqrt(variance / len(values)))


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples solves an example."""
    # Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1.
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def summarise(label: str, samples: Collection[Sample], passes: Sequence[int], solved_reward: float) -> LabelResult:
    """Compute the results of one environment, whose examples have equally many samples. `passes`: values of k."""
    by_example: Mapping[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_example[sample.example].append(sample)
    examples = list(by_example.values())
    solved = [sum(sample.reward >= solved_reward and sample.error is None for sample in group) for group in examples]
    sizes = [len(group) for group in examples]
    # Failed samples count as reward 0. Lengths, turns and metrics describe only samples that ran to their end.
    successes = [sample for sample in samples if sample.error is None]
    metrics: Mapping[str, list[float]] = defaultdict(list)
    for sample in successes:
        for name, value in sample.metrics.items():
            metrics[name].append(value)
    return LabelResult(
        label=label,
        examples=len(examples),
        samples=max(sizes),
        reward=estimate_mean([fmean(sample.reward for sample in group) for group in examples]),
        pass_at={k: estimate_mean([pass_at_k(n, c, k) for n, c in zip(sizes, solved, strict=True)]) for k in passes},
        failed=1 - len(successes) / len(samples),
        truncated=fmean([sample.finish_reason == "length" for sample in successes] or [0.0]),
        length=fmean([sample.tokens for sample in successes] or [0.0]),
        turns=fmean([sample.turns for sample in successes] or [0.0]),
        metrics={name: fmean(values) for name, values in metrics.items()},
    )


class EvaluationHeader(msgspec.Struct, frozen=True):
    """First line of `progress.jsonl`: how the evaluation began."""

    step: int
    version: int  # Policy version of the engines
    time: float  # Unix seconds


class Archive:
    """The evaluations of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._appenders: dict[int, Appender] = {}

    def records(self) -> list[EvaluationRecord]:
        """Read all finished evaluations, sorted by step."""
        return records.evaluations(self._run_dir)

    def set_aside(self, newest: int, attempt: int) -> list[int]:
        """Rename evaluations of steps after `newest`, from which the run resumes. Return these steps."""
        # They will be trained and evaluated again. The attempt in the name keeps the directories apart.
        undone = [step for step in records.steps(self._run_dir) if step > newest]
        for step in undone:
            path = records.step_dir(self._run_dir, step)
            durable.rename(path, path.with_name(f"{path.name}.undone-{attempt}"))
        return undone

    def unfinished(self) -> tuple[EvaluationHeader, list[Sample]] | None:
        """Read the newest evaluation if it is not finished. Raises OSError."""
        steps = records.steps(self._run_dir)
        if not steps or files.exists(records.step_dir(self._run_dir, steps[-1]) / records.SUMMARY):
            return None
        try:
            # A killed orchestrator may leave an incomplete last line, which [:-1] drops.
            lines = files.read_bytes(self._progress(steps[-1])).split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        try:
            header = decode_json(lines[0], EvaluationHeader)
        except (IndexError, DamagedError):
            return None  # the orchestrator was killed before the header was on disk
        samples = []
        for line in lines[1:]:
            try:
                samples.append(decode_json(line, Sample))
            except DamagedError as error:
                log.warning("evaluation of step %d: a sample on disk is damaged and runs again: %s", header.step, error)
        return header, samples

    def begin(self, header: EvaluationHeader, samples: Collection[Sample] = ()) -> None:
        """Write the header of an evaluation, with samples that have already ended. Raises OSError."""
        path = self._progress(header.step)
        durable.make_directory(path.parent)
        durable.write(path, b"".join(msgspec.json.encode(each) + b"\n" for each in (header, *samples)))

    def add(self, step: int, sample: Sample) -> None:
        """Append a sample. If the disk is full, only a restart would repeat it, so the evaluation goes on."""
        try:
            if step not in self._appenders:
                self._appenders = {step: Appender(self._progress(step))}
            self._appenders[step].append(msgspec.json.encode(sample) + b"\n")
        except OSError as error:
            log.warning("evaluation of step %d: cannot write a sample to disk: %s", step, error)

    def finish(self, record: EvaluationRecord, samples: Collection[Sample]) -> None:
        """Write the results. If this raises OSError, the evaluation is not finished."""
        directory = records.step_dir(self._run_dir, record.step)
        in_order = sorted(samples, key=lambda each: (each.label, each.example, each.sample))
        # The summary is written last: it makes the evaluation count as finished.
        for label, of_label in groupby(in_order, key=lambda each: each.label):
            write_atomic(directory / f"{label}.jsonl", _example_lines(list(of_label)))
        durable.write(directory / records.SUMMARY, json.dumps(msgspec.to_builtins(record), indent=2) + "\n")
        files.unlink(self._progress(record.step))

    def _progress(self, step: int) -> Path:
        return records.step_dir(self._run_dir, step) / PROGRESS


def _example_lines(samples: Sequence[Sample]) -> str:
    """Return a line for each example, with its mean reward and its samples."""
    lines = []
    for example, of_example in groupby(samples, key=lambda each: each.example):
        results = [msgspec.to_builtins(sample) for sample in of_example]
        for result in results:
            del result["label"], result["example"]
        line = {"example": example, "reward": fmean(result["reward"] for result in results), "samples": results}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)
