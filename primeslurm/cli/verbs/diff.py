"""`primeslurm diff`: compare two recipes or runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from primeslurm.api.recipes.comparison import Comparison, compare
from primeslurm.base.errors import ExitCode
from primeslurm.base.units import count, gib, tokens
from primeslurm.cli.options import JsonOpt, LocalOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.plan import amount_text
from primeslurm.cli.views.plan_verdict import resources, role_rows
from primeslurm.cli.views.tables import fold, light_table, out, pattern
from primeslurm.plan.model import Plan
from primeslurm.run.diff import Difference


def diff_(
    a: Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", metavar="B")],
    site: SiteOpt = None,
    runs: RunsOpt = None,
    local: LocalOpt = False,
    every: Annotated[bool, typer.Option("--all", help="Show differences in job, processes and ports, too.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Compare two recipes or runs.

    It shows the fields of the recipes that differ, and what that changes: nodes, GPUs, memory, KV cache, times. Names
    and directories of runs are not compared.

    Examples:
        primeslurm diff recipes/glm5_pd.yaml recipes/glm5_r3.yaml
        primeslurm diff my-run my.yaml --all
    """
    comparison = compare(a, b, site=site, runs=runs, local=local)
    if as_json:
        print_json(msgspec.to_builtins([*comparison.recipe, *comparison.plan]))
    elif comparison.same:
        note("no difference")
    else:
        show_comparison(Path(a).name, Path(b).name, comparison, every=every)
    if not comparison.same:
        raise typer.Exit(ExitCode.FAILED)


# Characters of a value of a recipe that are shown; `--json` has the whole value.
LONGEST_VALUE = 80
# Amounts of a plan that are compared as results.
AMOUNTS = ("trainer step, sequences of seq_len", "checkpoint", "weight update", "KV in host memory", "engine start")
# Fields that say where a process runs: processes that all moved are one difference.
PLACES = ("node", "on")


def show_comparison(a: str, b: str, comparison: Comparison, *, every: bool) -> None:
    """Print the fields that differ, then the results, and with `every` all details below the headings `a` and `b`."""
    if comparison.recipe:
        table = light_table("recipe", a, b)
        table.columns[0].no_wrap = True
        for difference in comparison.recipe:
            table.add_row(difference.field, *(_cut(value) for value in (difference.a, difference.b)))
        out.print(table)
    if results := result_rows(comparison.a, comparison.b):
        out.print()
        table = light_table("result", a, b)
        for row in results:
            table.add_row(*row)
        out.print(table)
    if not comparison.plan:
        return
    out.print()
    if every or not (comparison.recipe or results):
        out.print(summary_of(comparison.plan))
        out.print(difference_table(a, b, comparison.plan))
    else:
        note(f"{count(len(comparison.plan), 'difference')} in the job, processes and ports: --all shows them")


def result_rows(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """Return name and values of the results that differ between two plans."""
    one, other = _results(a), _results(b)
    rows = [(name, one.get(name, "-"), other.get(name, "-")) for name in dict.fromkeys((*one, *other))]
    return [row for row in rows if row[1] != row[2]]


def _results(plan: Plan) -> dict[str, str]:
    rows = role_rows(plan)
    results = resources(plan, rows)
    results |= {"routers": str(plan.totals.routers), "engines": str(plan.totals.engines)}
    for row in rows:
        results[f"{row.role} nodes"] = str(row.nodes)
        if row.memory:
            results[f"{row.role} memory"] = f"{row.memory.needed_gib:.0f} of {gib(row.memory.limit_gib)} per GPU"
            if row.memory.kv_tokens:
                results[f"{row.role} KV cache"] = f"{tokens(row.memory.kv_tokens)} tokens per GPU"
    amounts = {amount.name: amount for amount in plan.estimate.amounts} if plan.estimate else {}
    return results | {name: amount_text(amounts[name]) for name in AMOUNTS if name in amounts}


def _cut(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 3]}..."


def summary_of(differences: Sequence[Difference]) -> str:
    parts = Counter(each.where for each in differences)
    return f"{count(len(differences), 'difference')}: " + ", ".join(
        f"{where} {number}" for where, number in parts.items()
    )


def difference_table(a: str, b: str, differences: Sequence[Difference]) -> Table:
    """Return a table of differences, in which similar ones share a row. `a` and `b` are column headings."""
    table = light_table("part", "field", a, b)
    for group in _alike(differences):
        table.add_row(*_row(group))
    return table


def _alike(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Group differences with the same values whose fields differ only in numbers."""
    alike: dict[object, list[Difference]] = {}
    for difference in differences:
        # Processes that all moved to other nodes are one difference.
        values = [
            pattern(value) if value and difference.field in PLACES else value for value in (difference.a, difference.b)
        ]
        members = frozenset(map(pattern, difference.members))
        alike.setdefault((pattern(difference.where), pattern(difference.field), *values, members), []).append(
            difference
        )
    return list(alike.values())


def _row(group: Sequence[Difference]) -> tuple[str, str, str, str]:
    members = list(dict.fromkeys(name for each in group for name in each.members))
    names = fold(members)
    part = ", ".join(names) or _folded([each.where for each in group])
    part += f" ({len(members)})" if len(members) > len(names) else ""
    one, other = ([each.a for each in group if each.a is not None], [each.b for each in group if each.b is not None])
    return part, _folded([each.field for each in group]), _folded(one), _folded(other)


def _folded(texts: Sequence[str]) -> str:
    return ", ".join(fold(texts)) or "-"
