"""The verb that compares: diff."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from primeslurm.api.comparing import compare
from primeslurm.cli.options import AllOpt, JsonOpt, LocalOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.differences import difference_table, summary_of
from primeslurm.cli.views.tables import out
from primeslurm.errors import ExitCode

Side = Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", show_default=False)]


def diff_(
    a: Side,
    b: Side,
    site: SiteOpt = None,
    runs: RunsOpt = None,
    local: LocalOpt = False,
    every: AllOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Compare two recipes or runs.

    Exit code 0: the same; 1: they differ. Names and directories of the runs do not count.
    """
    found = compare(a, b, site=site, runs=runs, local=local)
    if as_json:
        print_json(msgspec.to_builtins(found))
    elif found:
        out.print(summary_of(found))
        out.print(difference_table(a, b, found, every=every))
    else:
        note("no difference")
    if found:
        raise typer.Exit(ExitCode.FAILED)
