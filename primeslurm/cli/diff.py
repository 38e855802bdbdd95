"""The verb that compares: diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from primeslurm.cli.options import JsonOpt, LocalOpt, SiteOpt, load
from primeslurm.cli.output import light_table, note, out, print_json
from primeslurm.cli.runs import RunsOpt, find_run
from primeslurm.plan.model import Plan
from primeslurm.recipe.paths import is_dir
from primeslurm.run.diff import Difference, diff

DIFFERENT = 1
RECIPES = (".yaml", ".yml")
MANY = 3

Side = Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", show_default=False)]


def diff_(
    a: Side,
    b: Side,
    site: SiteOpt = None,
    runs: RunsOpt = None,
    local: LocalOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Compare two recipes or runs by what they would do: nodes, processes, commands, job options.

    Exit code 0: the same; 1: they differ. Names and directories of the runs do not count.
    """
    one, other = (_plan(side, site, runs, local) for side in (a, b))
    found = diff(one, other)
    if as_json:
        print_json(msgspec.to_builtins(found))
    elif found:
        out.print(_table(a, b, found))
    else:
        note("no difference")
    if found:
        raise typer.Exit(DIFFERENT)


def _plan(side: str, site: Path | None, runs: Path | None, local: bool) -> Plan:
    path = Path(side)
    if path.suffix in RECIPES and not is_dir(path):
        return load(path, site, None, None, local, need_files=False).plan
    return find_run(side, runs).latest().plan()


def _table(a: str, b: str, found: list[Difference]) -> Table:
    table = light_table("part", "field", a, b)
    for each in found:
        table.add_row(_part(each), each.field, *(value if value is not None else "-" for value in (each.a, each.b)))
    return table


def _part(difference: Difference) -> str:
    names = difference.members
    if not names:
        return difference.where
    return ", ".join(names) if len(names) <= MANY else f"{names[0]} ... {names[-1]} ({len(names)})"
