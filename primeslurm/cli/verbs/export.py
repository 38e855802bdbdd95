"""`primeslurm export`, `convert` and `report`: write checkpoints as Hugging Face models, and a run as an HTML file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.runs import export as exporting
from primeslurm.api.runs.run import find_run
from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.files import require_replaceable, write_atomic
from primeslurm.cli.options import JsonOpt, RunArg, RunsOpt
from primeslurm.cli.output import print_json, warn
from primeslurm.cli.views.tables import out

DirectoryArg = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory to create. It must not exist.", show_default=False)
]


def export(
    run: RunArg,
    directory: DirectoryArg,
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the checkpoint. Default: the newest.", metavar="N")
    ] = None,
    runs: RunsOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Export a checkpoint as a Hugging Face model.

    The directory gets weights, configuration and tokenizer. No GPU is needed.

    Examples:
        primeslurm export my-run ./my-model
        primeslurm export my-run ./my-model --step 200
    """
    _print_path("directory", exporting.export(find_run(run, runs), directory, step), as_json)


def convert(
    model: Annotated[
        str, typer.Argument(help="Model directory, or hub id in the Hugging Face cache.", metavar="MODEL")
    ],
    directory: DirectoryArg,
    as_json: JsonOpt = False,
) -> None:
    """Convert an INT4, MXFP4 or FP8 checkpoint to bfloat16.

    RL needs a bfloat16 checkpoint, because engines load bfloat16 weights.

    Examples:
        primeslurm convert openai/gpt-oss-120b /shared/models/gpt-oss-120b-bf16
    """
    _print_path("directory", exporting.convert(model, directory, partial(typer.echo, err=True)), as_json)


def report(
    run: RunArg,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File to write. Default: report.html in the run directory.", metavar="FILE"
        ),
    ] = None,
    runs: RunsOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Write the dashboard's pages about a run as one HTML file.

    The file has curves, evaluations, fleet, events, plan and recipe, to keep or to send. It needs no network.

    Examples:
        primeslurm report my-run -o my-run.html
    """
    selected = find_run(run, runs)
    target = output or selected.path / "report.html"
    text = selected.report(if_silent=warn)
    try:
        require_replaceable(target)
        write_atomic(target, text)
    except (OSError, ValueError) as error:  # ValueError: a path without a last part
        why = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UsageError([Violation("--output", str(target), why)]) from None
    _print_path("file", target, as_json)


def _print_path(name: str, path: Path, as_json: bool) -> None:
    if as_json:
        print_json({name: str(path)})
    else:
        out.print(str(path), soft_wrap=True)
