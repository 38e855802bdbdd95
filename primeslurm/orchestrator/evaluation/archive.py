"""Evaluations on disk: `evaluations/step-000050/`.

    progress.jsonl   while it runs: what it began with, then a line for each sample that ended
    <label>.jsonl    when it is done: a line for each example, with its samples
    summary.json     written last, with the results

A sample counts once its line is written, so that a killed orchestrator goes on with what is there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

import msgspec

from primeslurm.base import durable, files
from primeslurm.base.files import Appender, write_atomic
from primeslurm.orchestrator.evaluation.statistics import Sample, SampleResult
from primeslurm.records import evaluation as records
from primeslurm.records.evaluation import EvaluationRecord
from primeslurm.wire.decoding import DamagedError, decode_json

log = logging.getLogger(__name__)

PROGRESS = "progress.jsonl"


class EvaluationHeader(msgspec.Struct, frozen=True):
    """How an evaluation began: the first line of its progress."""

    step: int
    version: int
    """Policy version that the engines had."""
    time: float
    """Unix seconds."""


class EvaluatedExample(msgspec.Struct, frozen=True):
    """A line of `<label>.jsonl`."""

    example: int
    reward: float
    """Mean of its samples."""
    samples: list[SampleResult]


class Archive:
    """The evaluations of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._appenders: dict[int, Appender] = {}

    def _appender(self, step: int) -> Appender:
        if step not in self._appenders:
            self._appenders = {step: Appender(self._progress(step))}
        return self._appenders[step]

    def records(self) -> list[EvaluationRecord]:
        """Read all that are done, by step."""
        return records.evaluations(self._run_dir)

    def set_aside(self, newest: int, attempt: int) -> list[int]:
        """Rename evaluations of steps that were undone: they are trained, and then evaluated, again.

        Args:
            newest: policy version that the run resumes from.
            attempt: that resumes.

        Returns:
            The steps.
        """
        undone = [step for step in records.steps(self._run_dir) if step > newest]
        for step in undone:
            path = records.step_dir(self._run_dir, step)
            durable.rename(path, path.with_name(f"{path.name}.undone-{attempt}"))
        return undone

    def unfinished(self) -> tuple[EvaluationHeader, list[Sample]] | None:
        """Read the newest evaluation that began and is not done, if it is the newest of all. Raises OSError."""
        steps = records.steps(self._run_dir)
        if not steps or files.exists(records.step_dir(self._run_dir, steps[-1]) / records.SUMMARY):
            return None
        try:
            lines = files.read_bytes(self._progress(steps[-1])).split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        try:
            begun = decode_json(lines[0], EvaluationHeader)
        except (IndexError, DamagedError):
            return None  # killed before it was on disk
        samples = []
        for line in lines[1:]:
            try:
                samples.append(decode_json(line, Sample))
            except DamagedError as error:
                log.warning("a sample of the evaluation of step %d is lost: %s", begun.step, error)
        return begun, samples

    def begin(self, begun: EvaluationHeader, samples: Collection[Sample] = ()) -> None:
        """Put the beginning of an evaluation on disk, with the samples that are there already. Raises OSError."""
        path = self._progress(begun.step)
        durable.make_directory(path.parent)
        durable.write(path, b"".join(msgspec.json.encode(each) + b"\n" for each in (begun, *samples)))

    def keep(self, step: int, sample: Sample) -> None:
        """Add a sample that ended. A full disk costs durability, never the evaluation."""
        try:
            self._appender(step).append(msgspec.json.encode(sample) + b"\n")
        except OSError as error:
            log.warning("a sample of the evaluation of step %d is not on disk: %s", step, error)

    def finish(self, record: EvaluationRecord, samples: Collection[Sample]) -> None:
        """Put the results on disk. Raises OSError, and the evaluation is not done then."""
        directory = records.step_dir(self._run_dir, record.step)
        in_order = sorted(samples, key=lambda each: (each.label, each.example, each.sample))
        for label, found in groupby(in_order, key=lambda each: each.label):
            write_atomic(directory / f"{label}.jsonl", _lines(list(found)))
        durable.write(directory / records.SUMMARY, json.dumps(msgspec.to_builtins(record), indent=2) + "\n")
        files.unlink(self._progress(record.step))

    def _progress(self, step: int) -> Path:
        return records.step_dir(self._run_dir, step) / PROGRESS


def _lines(samples: Sequence[Sample]) -> str:
    """One line for each example."""
    lines = []
    for example, found in groupby(samples, key=lambda each: each.example):
        kept = [sample.result for sample in found]
        line = EvaluatedExample(example, fmean(sample.reward for sample in kept), kept)
        lines.append(json.dumps(msgspec.to_builtins(line)) + "\n")
    return "".join(lines)
