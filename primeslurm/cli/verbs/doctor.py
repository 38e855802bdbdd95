"""`primeslurm doctor`: find out why a run failed, or check an installation."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import typer

from primeslurm.api.runs.run import find_run
from primeslurm.api.submission import installed
from primeslurm.base.errors import ExitCode, UsageError, Violation
from primeslurm.cli.options import AttemptOpt, JsonOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import print_json, warn
from primeslurm.cli.views.doctor import show_diagnosis, show_installed
from primeslurm.run.diagnosis.validity import MAX_KL


def doctor(
    run: Annotated[
        str | None, typer.Argument(help="Name or directory of a run.", metavar="RUN", show_default=False)
    ] = None,
    runs: RunsOpt = None,
    attempt: AttemptOpt = None,
    max_kl: Annotated[
        float, typer.Option("--max-kl", help="Largest KL between trainer and engines of a valid run.", metavar="KL")
    ] = MAX_KL,
    site: SiteOpt = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Without RUN: check the installation of this node.", metavar="NODE")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Without RUN: check the installation of every node of the site.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Find out why a run failed, or check an installation.

    With RUN, doctor names the first failure, what followed from it, and what to do. It reports a run as invalid if the
    run trains but learns nothing useful. Without RUN, it compares the packages on this host, or on nodes of the
    cluster, with the locked versions.

    Examples:
        primeslurm doctor my-run
        primeslurm doctor --all
    """
    if run is not None and (node is not None or every):
        field, value = ("--node", node) if node is not None else ("--all", "")
        raise UsageError([Violation(field, value, "checks an installation, and RUN is a run", "keep one of them")])
    if not 0 <= max_kl < math.inf:  # nothing is larger than nan: no run would be invalid
        raise UsageError(
            [Violation("--max-kl", str(max_kl), "must be a finite number of at least 0", f"default: {MAX_KL}")]
        )
    if run is None:
        packages = installed(site, node, every=every)
        show_installed(packages, as_json)
        well = packages.well
    else:
        diagnosis = find_run(run, runs).diagnose(attempt, max_kl=max_kl, if_silent=warn)
        if as_json:
            print_json(msgspec.to_builtins(diagnosis))
        else:
            show_diagnosis(diagnosis)
        well = diagnosis.well
    if not well:
        raise typer.Exit(ExitCode.FAILED)
