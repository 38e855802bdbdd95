"""`primeslurm doctor`: find out why a run failed, or check an installation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from primeslurm.api.runs.run import find_run
from primeslurm.api.submission import Installed, installed
from primeslurm.base.errors import ExitCode, UsageError, Violation
from primeslurm.base.hostlists import compress
from primeslurm.cli.options import AttemptOpt, JsonOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import note, print_json, warn
from primeslurm.cli.views.tables import out
from primeslurm.records.fleet import outcome_text
from primeslurm.run.diagnosis.doctor import Diagnosis, ExaminedFailure
from primeslurm.run.diagnosis.validity import MAX_KL
from primeslurm.slurm.inventory import InstalledDifference, Parts


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


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the first failure of an attempt, its consequences, and possible fixes."""
    out.print(
        f"{diagnosis.run}, attempt {diagnosis.attempt}: {outcome_text(diagnosis.outcome, diagnosis.reason)}",
        soft_wrap=True,
    )
    if diagnosis.first is None:
        out.print("no failure" + (" from which the run did not recover" if diagnosis.recovered else ""))
    else:
        _show_first(diagnosis.first)
    if diagnosis.followed:
        _section("what followed")
        table = Table.grid(padding=(0, 2))
        for event in diagnosis.followed:
            table.add_row(_clock(event.time), event.who, Text(event.text))
        out.print(table)
    if diagnosis.recovered:
        _section("recovered automatically")
        for failure in diagnosis.recovered:
            out.print(f"{_clock(failure.time)}  {failure.component} {failure.how}", markup=False, soft_wrap=True)
    for problem in diagnosis.invalid:
        out.print(Text(f"invalid because {problem}", style="red"), soft_wrap=True)
    for text in diagnosis.damaged:
        out.print(Text(text, style="red"), soft_wrap=True)
    for advice in diagnosis.advice:
        changes = "".join(f"; {field}: {value}" for field, value in advice.changes.items())
        out.print(Text.assemble(("advice ", "bold"), f"{advice.text}{changes} ({advice.reason})"), soft_wrap=True)
    if len(diagnosis.attempts) > 1:
        _section("attempts")
        for line in diagnosis.attempts:
            step = f", committed step {line.committed_step}" if line.committed_step is not None else ""
            out.print(f"{line.number}  {outcome_text(line.outcome, line.reason)}{step}", markup=False, soft_wrap=True)


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
    if not seconds:  # no record has the time
        return "at an unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_installed(installed: Installed, as_json: bool) -> None:
    """Print the packages of nodes, with missing ones and other versions marked."""
    if as_json:
        print_json({"nodes": installed.nodes, "differences": [asdict(each) for each in installed.differences]})
    else:
        _show_parts(installed.nodes, installed.differences)


def _show_parts(nodes: Mapping[str, Parts], differences: Sequence[InstalledDifference]) -> None:
    """Print a row for each part. Nodes with the same parts share a column."""
    marked = {(each.node, each.part): each for each in differences}
    # On a homogeneous cluster of any size, this is one column.
    columns: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for name, parts in nodes.items():
        columns.setdefault(tuple(parts.items()), []).append(name)
    table = Table("part", *(compress(names) for names in columns.values()))
    for part in dict.fromkeys(part for parts in columns for part, _ in parts):
        cells = []
        for versions, names in columns.items():
            value, difference = dict(versions).get(part), marked.get((names[0], part))
            text = value or "-"
            if difference is not None:
                text += f" (locked: {difference.wanted})" if difference.wanted else " (required)"
            cells.append(Text(text, style="red" if difference else ""))
        table.add_row(part, *cells)
    out.print(table)
    for line in difference_lines(differences):
        note(line)


def difference_lines(wrong: Sequence[InstalledDifference]) -> list[str]:
    """Return a line for each difference, with all nodes that have it."""
    nodes: dict[tuple[str, str | None, str | None], list[str]] = {}
    for each in wrong:
        nodes.setdefault((each.part, each.found, each.wanted), []).append(each.node)
    return [
        f"{compress(names)}: {part} is {found or 'missing'}{f', locked {wanted}' if wanted else ''}"
        for (part, found, wanted), names in nodes.items()
    ]
