"""`primeslurm dashboard`: serve a web page about all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.dashboard import dashboard as open_dashboard
from primeslurm.cli.output import note
from primeslurm.cli.views.tables import out


def dashboard(
    runs: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of runs. Default: the site file's, or ./runs.", metavar="RUNS_DIR", show_default=False
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", help="Address or name to listen on. Other computers reach only theirs.", metavar="HOST"),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port. Default: the first free one from 8420.", metavar="PORT"),
    ] = None,
) -> None:
    """Serve a web page about all runs, with live curves.

    The page shows metrics, fleet, events, logs, plan and recipe of each run, and compares runs. The printed address
    contains a token, because every user of this machine can reach the port. Ctrl-C ends the dashboard; runs continue.

    Examples:
        primeslurm dashboard
        primeslurm dashboard /shared/runs --port 9000
    """
    served = open_dashboard(runs, host=host, port=port)
    out.print(served.url, soft_wrap=True, highlight=False)
    note(f"Runs of {served.runs}. Ctrl-C ends the dashboard; runs continue.")
    if served.tunnel:
        note(f"From your own computer, open a tunnel first:\n  {served.tunnel}")
    served.serve()
