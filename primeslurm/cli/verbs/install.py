"""`primeslurm install`: install what nodes need at run time, or a small model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.setup import installing
from primeslurm.api.setup.installing import Installation
from primeslurm.base.errors import UsageError, Violation
from primeslurm.cli.output import note


def install(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="The environment of GPU nodes (CUDA 13). Needs no GPU here.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="The environment of machines without GPUs.")] = False,
    to: Annotated[Path | None, typer.Option("--to", help="Directory, on a file system that all nodes share.")] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="Interpreter or version. Default: a standalone one in the directory.")
    ] = None,
    harness: Annotated[
        str | None, typer.Option("--harness", metavar="NAME", help="Packages of a harness: mini_swe_agent.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="A small model: smollm2.")] = None,
    games: Annotated[bool, typer.Option("--games", help="The games of TextArena.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> None:
    """Install what nodes need at run time, or a small model.

    The environment has the exact versions that were tested together, and this version of primeslurm. It can be
    installed on a login node: Slurm and GPUs are not needed. Harnesses and games go into the environment of this
    command, and a model into .primeslurm/NAME/model, if `--to` names no other place.

    Examples:
        primeslurm install --gpu --to /shared/primeslurm
        primeslurm install --model smollm2
    """
    choice = _wanted(gpu, cpu, harness, model, games)
    if choice in ("--gpu", "--cpu") and to is None:
        raise UsageError([Violation("--to", "", f"{choice} needs a directory", "for example /shared/primeslurm")])
    if python is not None and choice not in ("--gpu", "--cpu"):
        raise UsageError(
            [Violation("--python", python, f"goes with --gpu and --cpu, not with {choice}", "leave it out")]
        )
    plan = _plan(choice, to, python, harness or model or "")
    if dry_run:
        for step in plan.steps:
            typer.echo(step.shown())
        return
    if plan.done:
        note(f"{plan.what} is installed already")
    else:
        note(f"installing {plan.what}")
        plan.run()
    result = plan.stamp.parent
    typer.echo(result / "bin" / "python" if choice in ("--gpu", "--cpu") else result)
    if choice in ("--gpu", "--cpu"):
        note(f"put this line into the site file: python: {result / 'bin' / 'python'}")


def _wanted(gpu: bool, cpu: bool, harness: str | None, model: str | None, games: bool) -> str:
    options = {"--gpu": gpu, "--cpu": cpu, "--harness": harness, "--model": model, "--games": games}
    chosen = [option for option, value in options.items() if value]
    if len(chosen) != 1:
        why = f"{' and '.join(chosen)} cannot be combined" if chosen else "nothing to install was chosen"
        raise UsageError([Violation("install", "", why, f"give one of {', '.join(options)}")])
    return chosen[0]


def _plan(choice: str, to: Path | None, python: str | None, name: str) -> Installation:
    if choice == "--model":
        return installing.plan_model_installation(name, to)
    if to is None or choice in ("--harness", "--games"):
        environment = to or Path(sys.prefix)
        return (
            installing.plan_harness_installation(name, environment)
            if choice == "--harness"
            else installing.plan_games_installation(environment)
        )
    return installing.plan_runtime_installation("gpu" if choice == "--gpu" else "cpu", to, python=python)
