"""The verb that makes a model of a checkpoint: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api import exporting
from primeslurm.api.runs import find_run
from primeslurm.cli.options import RunArg, RunsOpt
from primeslurm.cli.views.tables import out


def export(
    run: RunArg,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made by this command.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="A committed step. Default: the newest.")] = None,
    runs: RunsOpt = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model, with config and tokenizer. It needs no GPU."""
    out.print(str(exporting.export(find_run(run, runs), directory, step)), markup=False, soft_wrap=True)
