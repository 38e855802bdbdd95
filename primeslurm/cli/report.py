"""The verb that writes a page about a run: report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.cli.output import out
from primeslurm.cli.runs import RunArg, RunsOpt, find_run, job_query, reading
from primeslurm.errors import UsageError, Violation
from primeslurm.files import write_atomic


def report(
    run: RunArg,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: report.html in the run.")] = None,
    runs: RunsOpt = None,
) -> None:
    """Write one HTML page about a run, with plots; it needs neither network nor scripts to be read."""
    from primeslurm.run.report import report as page

    directory = find_run(run, runs)
    target = output or directory.path / "report.html"
    with reading(directory):
        text = page(directory, job_query(directory), time.time())
    try:
        write_atomic(target, text)
    except (OSError, ValueError) as error:  # ValueError: a path without a last part
        why = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UsageError([Violation("--output", str(target), why)]) from None
    out.print(str(target), markup=False, soft_wrap=True)
