"""`primeslurm diff`: compare two recipes or runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from primeslurm.api.recipes.comparison import Comparison, compare
from primeslurm.base.errors import ExitCode
from primeslurm.base.units import gib, tokens
from primeslurm.cli.options import JsonOpt, LocalOpt, RunsOpt, SiteOpt
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.plan import amount_text
from primeslurm.cli.views.plan_verdict import resources, role_rows
from primeslurm.cli.views.tables import light_table, out
from primeslurm.plan.model import Plan
from primeslurm.run.diff import Difference


def diff_(
    a: Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Recipe file, or name or directory of a run.", metavar="B")],
    site: SiteOpt = None,
    runs: RunsOpt = None,
    local: LocalOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Compare two recipes or runs.

    It shows the fields of the recipes that differ, and what that changes: nodes, GPUs, memory, KV cache, times. Names
    and directories of runs are not compared.

    Examples:
        primeslurm diff recipes/glm5_pd.yaml recipes/glm5_r3.yaml
        primeslurm diff my-run my.yaml
    """
    comparison = compare(a, b, site=site, runs=runs, local=local)
    results = result_rows(comparison.a, comparison.b)
    if as_json:
        print_json(msgspec.to_builtins([*comparison.recipe, *(Difference(*row) for row in results)]))
    elif comparison.recipe or results:
        show_comparison(Path(a).name, Path(b).name, comparison, results)
    else:
        note("no difference")
    if comparison.recipe or results:
        raise typer.Exit(ExitCode.FAILED)


# Characters of a value of a recipe that are shown; `--json` has the whole value.
LONGEST_VALUE = 80
# Amounts of a plan that are compared as results.
AMOUNTS = ("trainer step, sequences of seq_len", "checkpoint", "weight update", "KV in host memory", "engine start")


def show_comparison(a: str, b: str, comparison: Comparison, results: Sequence[tuple[str, str, str]]) -> None:
    """Print the fields that differ, then the results, below the headings `a` and `b`."""
    if comparison.recipe:
        table = light_table("recipe", a, b)
        table.columns[0].no_wrap = True
        for difference in comparison.recipe:
            table.add_row(difference.field, *(_cut(value) for value in (difference.a, difference.b)))
        out.print(table)
    if results:
        out.print()
        table = light_table("result", a, b)
        for row in results:
            table.add_row(*row)
        out.print(table)


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
