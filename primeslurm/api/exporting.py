"""A checkpoint of a run as a Hugging Face model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from primeslurm.api.runs import Run
from primeslurm.errors import RunError, UsageError, Violation
from primeslurm.paths import expanded, is_dir
from primeslurm.wire import checkpoints, manifest


def export(run: Run, directory: Path, step: int | None = None) -> Path:
    """Write a checkpoint of a run as a Hugging Face model, with config and tokenizer. It needs no GPU.

    Args:
        run: which run.
        directory: made by this.
        step: a committed step; by default the newest.

    Returns:
        The directory as an absolute path.

    Raises:
        UsageError: there is no such step, or the directory cannot be made.
        RunError: the checkpoint is damaged, or cannot be converted.
    """
    target = expanded(directory).absolute()
    problems = _problems(run, step, target)
    if problems:
        raise UsageError(problems)
    checkpoint = checkpoints.step_dir(run.path, step or checkpoints.committed(run.path)[-1])
    # The shards are checked while they are read; those of release 0.1.0 cannot be, and are read before.
    old = checkpoints.unchecked_shards(checkpoint)
    if damage := checkpoints.damage_at_sight(checkpoint) or manifest.differing(checkpoint, old):
        raise RunError("\n".join(damage))
    argv = [sys.executable, "-m", "primeslurm.trainer.checkpoints.export", "--checkpoint", str(checkpoint)]
    argv += ["--recipe", str(run.path / "recipe.resolved.json"), "--out", str(target)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return target


def _problems(run: Run, step: int | None, target: Path) -> list[Violation]:
    steps = checkpoints.committed(run.path)
    problems = []
    if not steps:
        problems.append(Violation("RUN", run.name, "has no committed checkpoint"))
    elif step is not None and step not in steps:
        nearest = min(steps, key=lambda committed: abs(committed - step))
        problems.append(Violation("--step", str(step), "is no committed step", f"nearest: {nearest}"))
    if os.path.lexists(target):
        problems.append(Violation("DIR", str(target), "exists already"))
    elif not is_dir(target.parent):
        problems.append(Violation("DIR", str(target), f"there is no directory {target.parent}"))
    return problems
