"""Export checkpoints as Hugging Face models, and convert quantized models to bfloat16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from primeslurm.api.runs.run import Run
from primeslurm.base import files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.base.model_files import model_directory
from primeslurm.base.paths import expanded
from primeslurm.models.quantization import four_bit_format, is_block_fp8, storage_format
from primeslurm.records import resolved_recipe as recipe_record
from primeslurm.wire.stored import checkpoints


def export(run: Run, directory: Path, step: int | None = None) -> Path:
    """Write a checkpoint of a run (by default the newest) as a Hugging Face model, with config and tokenizer.

    No GPU is needed. `directory` is created; its absolute path is returned. Raises UsageError if the step does not
    exist, or the directory exists or cannot be created, and RunError if the checkpoint is damaged or cannot be
    converted.
    """
    target = expanded(directory).absolute()
    problems = _problems(run, step, target)
    if problems:
        raise UsageError(problems)
    checkpoint = checkpoints.step_dir(run.path, step or checkpoints.committed(run.path)[-1])
    if damage := checkpoints.damage_at_sight(checkpoint):  # shards are checked while they are read
        raise RunError("\n".join(damage))
    _make_parent(target)
    argv = [sys.executable, "-m", "primeslurm.trainer.checkpoints.export", "--checkpoint", str(checkpoint)]
    argv += ["--recipe", str(run.path / recipe_record.FILE), "--out", str(target)]
    _run(argv)
    return target


def _problems(run: Run, step: int | None, target: Path) -> list[Violation]:
    steps = checkpoints.committed(run.path)
    problems = []
    if not steps:
        problems.append(Violation("RUN", run.name, "has no committed checkpoint"))
    elif step is not None and step not in steps:
        nearest = min(steps, key=lambda committed: abs(committed - step))
        problems.append(Violation("--step", str(step), "is not a committed step", f"nearest: {nearest}"))
    return [*problems, *_no_place(target)]


def _make_parent(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{target.parent} cannot be created: {error.strerror}"
        raise UsageError([Violation("DIR", str(target), why)]) from None


def _no_place(target: Path) -> list[Violation]:
    if os.path.lexists(target):
        return [Violation("DIR", str(target), "already exists")]
    return []


def _run(argv: list[str], progress: Callable[[str], None] | None = None) -> None:
    """Run a trainer command without GPUs, and pass its stderr to `progress`. Raises RunError with the last line."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    last = ""
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if progress and last:
                progress(last)
            last = line.rstrip() or last
    if process.returncode:
        raise RunError(last or f"exit code {process.returncode}")


def convert(model: str, directory: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Convert an INT4, MXFP4 or block-scale FP8 checkpoint to bfloat16, which engines load in RL. No GPU is needed.

    A repeated conversion continues after the last finished file. `progress` is called with lines that count the files.

    Raises:
        UsageError: the model does not exist or has another format, or the directory cannot be created.
        RunError: the model's files are damaged, or the disk is full.
    """
    target = expanded(directory).absolute()
    source = model_directory(model)
    problems = [*_unconvertible(model, source), *_no_place(target)]
    if problems or source is None:
        raise UsageError(problems)
    _make_parent(target)
    argv = [sys.executable, "-m", "primeslurm.trainer.weights.convert", "--source", str(source), "--out", str(target)]
    _run(argv, progress)
    return target


def _unconvertible(model: str, source: Path | None) -> list[Violation]:
    if source is None:
        return [Violation("MODEL", model, "is neither a directory nor in the Hugging Face cache")]
    try:
        config = json.loads(files.read_bytes(source / "config.json"))
        stored = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    except (OSError, ValueError, AttributeError) as error:
        return [Violation("MODEL", model, f"has no config.json that can be read: {error}")]
    if four_bit_format(stored) or is_block_fp8(stored):
        return []
    how = storage_format(stored)
    why = f"is stored in {how}, which cannot be converted" if how else "is not quantised: it can be used as it is"
    return [Violation("MODEL", model, why, "INT4 of compressed-tensors, MXFP4, or FP8 in blocks of 128 x 128")]
