"""The verb that says what is wrong: doctor."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from primeslurm.api.installed import installed
from primeslurm.api.runs import find_run
from primeslurm.cli.options import JsonOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import print_json, warn
from primeslurm.cli.views.installed import show_installed
from primeslurm.cli.views.tables import out
from primeslurm.errors import ExitCode
from primeslurm.run.diagnosis.doctor import Diagnosis, ExaminedFailure
from primeslurm.run.diagnosis.validity import MAX_KL


def doctor(
    run: Annotated[str | None, typer.Argument(help="Name of a run, or its directory.", show_default=False)] = None,
    runs: RunsOpt = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="Default: the newest.")] = None,
    max_kl: Annotated[float, typer.Option("--max-kl", help="Largest KL between trainer and engines.")] = MAX_KL,
    site: SiteOpt = None,
    node: Annotated[str | None, typer.Option("--node", help="Without RUN: what this node has.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Without RUN: what every node of the site has.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Name the first failure of a run, what followed from it, and what helps; exit code 1 if there is one.

    A run that trains on nothing useful is reported as invalid, with the reason. Without RUN: what is installed on this
    host (or with --node, --all on the cluster's nodes), held against the lock; exit code 1 if something required is
    missing or another version.
    """
    if run is None:
        parts = installed(site, node, every=every)
        show_installed(parts, as_json)
        well = parts.well
    else:
        found = find_run(run, runs).diagnose(attempt, max_kl=max_kl, if_silent=warn)
        if as_json:
            print_json(msgspec.to_builtins(found))
        else:
            _show(found)
        well = found.well
    if not well:
        raise typer.Exit(ExitCode.FAILED)


def _show(found: Diagnosis) -> None:
    reason = f" ({found.reason})" if found.reason else ""
    out.print(f"{found.run}, attempt {found.attempt}: {found.outcome}{reason}", markup=False, soft_wrap=True)
    if found.first is None:
        out.print("no failure" + (" that it did not get over by itself" if found.recovered else ""))
    else:
        _show_first(found.first)
    if found.followed:
        _section("what followed")
        table = Table.grid(padding=(0, 2))
        for event in found.followed:
            table.add_row(_clock(event.time), event.who, Text(event.text))
        out.print(table)
    if found.recovered:
        _section("got over by itself")
        for failure in found.recovered:
            out.print(f"{_clock(failure.time)}  {failure.component} {failure.how}", markup=False, soft_wrap=True)
    for problem in found.invalid:
        out.print(Text(f"invalid because {problem}", style="red"), soft_wrap=True)
    if len(found.attempts) > 1:
        _section("attempts")
        for line in found.attempts:
            step = f", committed step {line.committed_step}" if line.committed_step is not None else ""
            out.print(f"{line.number}  {line.outcome}: {line.reason}{step}", markup=False, soft_wrap=True)


def _show_first(first: ExaminedFailure) -> None:
    failure = first.failure
    where = f" on {failure.node}" if failure.node and failure.node not in failure.component else ""
    _section("first failure")
    out.print(Text(f"{_clock(failure.time)}  {failure.component}{where} {failure.how}", style="red"), soft_wrap=True)
    if first.error:
        out.print(Text.assemble(("error  ", "bold"), first.error), soft_wrap=True)
    for cause in first.causes:
        out.print(Text.assemble(("cause  ", "bold"), cause.cause), soft_wrap=True)
        out.print(Text.assemble(("fix    ", "bold"), cause.fix), soft_wrap=True)
    if first.last_lines:
        _section(f"last lines of {first.log}")
        for text in first.last_lines:
            out.print(text, markup=False, soft_wrap=True)


def _section(title: str) -> None:
    out.print(Text(f"\n{title}", style="bold"), soft_wrap=True)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
