"""Cost of flushing records to disk before they count: a submission, a rollout group, progress, a checkpoint.

Each is written alternately with and without the flushes that `primeslurm.base.durable` adds. The cost depends on the
file system of the given directory.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from primeslurm.base import durable
from primeslurm.orchestrator.pipeline.progress import RunProgress
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool
from primeslurm.records import metrics
from primeslurm.run.directory import create
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.stored import checkpoints

RESULT = Path(__file__).resolve().parent / "results" / "durable_writes.json"
# Rollouts per group, and tokens per rollout.
GROUP, TOKENS = 8, 4096
# Number and size of a checkpoint's files, which the trainer's ranks have flushed.
FILES, FILE_BYTES = 16, 4 << 20


def submission(directory: Path, number: int) -> None:
    """Write the files of a submission, without submitit's two files."""
    from primeslurm.api.recipes.loading import load

    loaded = load(RECIPE, local=True, overrides={"model.path": str(directory)}, name=f"r{number}")
    plan = loaded.plan().model_copy(update={"run_dir": str(directory / f"r{number}")})
    began = time.perf_counter()
    create(loaded.recipe, plan, RECIPE)
    _took(began)


def group(directory: Path, number: int) -> None:
    """Write a finished group of rollouts."""
    ones = np.ones(TOKENS, np.int32)
    info = RolloutInfo("r", f"g{number}", "e", 0, 1.0)
    rollout = Rollout(info, ones, ones.astype(bool), ones.astype(np.float32), ones)
    found = RolloutGroup(f"g{number}", "e", 0, 0, ((rollout,),) * GROUP)
    spool = Spool(directory / "rollouts")
    began = time.perf_counter()
    spool.put(found)
    _took(began)


def progress(directory: Path, number: int) -> None:
    """Write the orchestrator's record before it serves a batch."""
    record = RunProgress(1, number, number, batches={number: [f"e-{i:08d}" for i in range(64)]})
    began = time.perf_counter()
    record.save(directory / "rollouts" / "progress.bin")
    _took(began)


def checkpoint(directory: Path, number: int) -> None:
    """Write from the last rank's file to COMMITTED, with the records before it."""
    path = checkpoints.step_dir(directory, number)
    (path / "trainer").mkdir(parents=True)
    for rank in range(FILES):
        (file := path / "trainer" / f"__{rank}_0.distcp").write_bytes(b"0" * FILE_BYTES)
        _flush(file)
    with (directory / metrics.FILE).open("a") as handle:
        handle.write("0" * 4096)
    began = time.perf_counter()
    metrics.sync(directory)
    checkpoints.commit(path, number, 1)
    _took(began)
    shutil.rmtree(path)


RECIPE = Path("recipes/reverse_text_single.yaml")
CASES: dict[str, Callable[[Path, int], None]] = {
    "submission": submission,
    "rollout group": group,
    "progress": progress,
    "checkpoint": checkpoint,
}
_flush = durable.sync
_times: list[float] = []


def _took(began: float) -> None:
    _times.append(time.perf_counter() - began)


def _seconds(case: Callable[[Path, int], None], directory: Path, number: int, *, flushed: bool) -> float:
    with mock.patch.object(durable, "sync", _flush if flushed else lambda path: None):
        case(directory, number)
    return _times.pop()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks durable_writes", description=__doc__)
    parser.add_argument("directory", type=Path, help="on the file system to be measured")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(words)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for case, write in CASES.items():
            (directory := Path(name) / case.replace(" ", "-")).mkdir()
            times: dict[bool, list[float]] = {True: [], False: []}
            for number in range(2 * options.repetitions):
                flushed = number % 2 == 0
                times[flushed].append(_seconds(write, directory, number, flushed=flushed))
            without, with_ = (1000 * statistics.median(times[flushed]) for flushed in (False, True))
            found[case] = {"ms without": round(without, 2), "ms": round(with_, 2)}
            print(f"{case:15} {without:8.2f} ms without, {with_:8.2f} ms with", flush=True)
    document = {"machine": platform.platform(), "repetitions": options.repetitions, "cases": found}
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {options.out}")
