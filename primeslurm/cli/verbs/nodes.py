"""`primeslurm nodes`: list the nodes that new jobs avoid because they failed, and let jobs use them again."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from primeslurm.api.sites import runs_directory
from primeslurm.api.submission import bad_nodes, forget_bad_nodes
from primeslurm.base.units import duration
from primeslurm.cli.options import JsonOpt, RunsOpt, YesOpt, confirm
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.tables import light_table, out

ForgetOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--forget",
        help="Let new jobs use these nodes again: a host list such as node[001-003], or --all. Repeatable.",
        metavar="NODES",
        show_default=False,
    ),
]
_EVERY = "--all"


def nodes(forget: ForgetOpt = None, runs: RunsOpt = None, yes: YesOpt = False, as_json: JsonOpt = False) -> None:
    """List nodes that new jobs avoid because they failed.

    Examples:
        primeslurm nodes
        primeslurm nodes --forget node[001-003]
    """
    directory, now = runs_directory(runs), time.time()
    hostlists = [value for value in forget or () if value != _EVERY]
    if _EVERY in (forget or ()):
        confirm("Let new jobs use all failed nodes again?", yes)
    for name in forget_bad_nodes(directory, hostlists, now, every=_EVERY in (forget or ())):
        note(f"new jobs may use {name} again")
    entries = bad_nodes(directory, now)
    if as_json:
        print_json(msgspec.to_builtins(entries))
        return
    table = light_table("node", "why", "run", "attempt", "failed", "avoided for")
    for entry in entries:
        # Another host with a fast clock may have written the entry.
        ago, left = max(0.0, now - entry.time), max(0.0, entry.expires - now)
        table.add_row(
            entry.node, entry.reason, entry.run, str(entry.attempt), f"{duration(ago)} ago", f"{duration(left)} more"
        )
    if entries:
        out.print(table)
    else:
        note("new jobs avoid no nodes")
