"""The verb that makes a model of a checkpoint: export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.cli.output import out
from primeslurm.cli.runs import RunArg, RunsOpt, find_run
from primeslurm.errors import RunError, UsageError, Violation
from primeslurm.recipe.paths import expanded, is_dir
from primeslurm.run.directory import RunDirectory
from primeslurm.wire import checkpoints


def export(
    run: RunArg,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made by this command.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="A committed step. Default: the newest.")] = None,
    runs: RunsOpt = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model, with config and tokenizer. It needs no GPU."""
    found = find_run(run, runs)
    target = expanded(directory).absolute()
    problems = _problems(found, step, target)
    if problems:
        raise UsageError(problems)
    checkpoint = checkpoints.step_dir(found.path, step or checkpoints.committed(found.path)[-1])
    if damage := checkpoints.damage(checkpoint):
        raise RunError("\n".join(damage))
    argv = [sys.executable, "-m", "primeslurm.trainer.checkpoint_export", "--checkpoint", str(checkpoint)]
    argv += ["--recipe", str(found.path / "recipe.resolved.json"), "--out", str(target)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RunError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    out.print(str(target), markup=False, soft_wrap=True)


def _problems(run: RunDirectory, step: int | None, target: Path) -> list[Violation]:
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
