"""Evaluations on disk, one directory each: `evaluations/step-000050/`.

    progress.jsonl   while the evaluation runs: a header, then one line for each sample that has ended
    <label>.jsonl    in the end: one line for each example, with its samples
    summary.json     the results, written last

A sample counts once its line is written, so a restarted orchestrator continues with the samples in the file.
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
    """First line of `progress.jsonl`: how the evaluation began."""

    step: int
    version: int
    """Policy version of the engines."""
    time: float
    """Unix seconds."""


class EvaluatedExample(msgspec.Struct, frozen=True):
    """A line of `<label>.jsonl`."""

    example: int
    reward: float
    """Mean of the samples."""
    samples: list[SampleResult]


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
    lines = []
    for example, of_example in groupby(samples, key=lambda each: each.example):
        results = [sample.result for sample in of_example]
        line = EvaluatedExample(example, fmean(result.reward for result in results), results)
        lines.append(json.dumps(msgspec.to_builtins(line)) + "\n")
    return "".join(lines)
