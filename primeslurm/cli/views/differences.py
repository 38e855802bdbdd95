"""Differences of two recipes or runs for a person: what the recipes say, what follows, and how many details differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from primeslurm.api.recipes.comparison import Comparison
from primeslurm.base.units import count, gib, tokens
from primeslurm.cli.output import note
from primeslurm.cli.views.folding import fold, pattern
from primeslurm.cli.views.plan import amount_text
from primeslurm.cli.views.plan_verdict import resources, role_rows
from primeslurm.cli.views.tables import light_table, out
from primeslurm.plan.model import Plan
from primeslurm.run.diff import Difference

LONGEST_VALUE = 80
"""Characters of a value of a recipe that are shown; `--json` has the whole value."""
AMOUNTS = ("trainer step, sequences of seq_len", "checkpoint", "weight update", "KV in host memory", "engine start")
"""Amounts of a plan that are compared as results."""
PLACES = ("node", "on")
"""Fields that say where a process runs: processes that all moved are one difference."""


def show_comparison(a: str, b: str, found: Comparison, *, every: bool) -> None:
    """Print how the recipes differ, then what that changes, then the number of differences in the details.

    Args:
        a: heading of the first column of values.
        b: heading of the second.
        found: the comparison.
        every: print the differences in the details, too.
    """
    if found.recipe:
        table = light_table("recipe", a, b)
        table.columns[0].no_wrap = True
        for each in found.recipe:
            table.add_row(each.field, *(_cut(value) for value in (each.a, each.b)))
        out.print(table)
    if results := result_rows(found.a, found.b):
        out.print()
        table = light_table("result", a, b)
        for row in results:
            table.add_row(*row)
        out.print(table)
    if not found.plan:
        return
    out.print()
    if every or not (found.recipe or results):
        out.print(summary_of(found.plan))
        out.print(difference_table(a, b, found.plan))
    else:
        note(f"{count(len(found.plan), 'difference')} in the job, processes and ports: --all shows them")


def result_rows(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """List the results of two plans that differ, in words."""
    one, other = _results(a), _results(b)
    rows = [(name, one.get(name, "-"), other.get(name, "-")) for name in dict.fromkeys((*one, *other))]
    return [row for row in rows if row[1] != row[2]]


def _results(plan: Plan) -> dict[str, str]:
    rows = role_rows(plan)
    found = resources(plan, rows)
    found |= {"routers": str(plan.totals.routers), "engines": str(plan.totals.engines)}
    for row in rows:
        found[f"{row.role} nodes"] = str(row.nodes)
        if row.memory:
            found[f"{row.role} memory"] = f"{row.memory.needed_gib:.0f} of {gib(row.memory.limit_gib)} per GPU"
            if row.memory.kv_tokens:
                found[f"{row.role} KV cache"] = f"{tokens(row.memory.kv_tokens)} tokens per GPU"
    amounts = {amount.name: amount for amount in plan.estimate.amounts} if plan.estimate else {}
    return found | {name: amount_text(amounts[name]) for name in AMOUNTS if name in amounts}


def _cut(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 3]}..."


def summary_of(found: Sequence[Difference]) -> str:
    """Say how many values differ, and in which parts."""
    parts = Counter(each.where for each in found)
    return f"{count(len(found), 'difference')}: " + ", ".join(f"{where} {number}" for where, number in parts.items())


def difference_table(a: str, b: str, found: Sequence[Difference]) -> Table:
    """Lay the differences side by side. Similar ones share a row.

    Args:
        a: heading of the first column of values.
        b: heading of the second.
        found: the differences.
    """
    table = light_table("part", "field", a, b)
    for group in _alike(found):
        table.add_row(*_row(group))
    return table


def _alike(found: Sequence[Difference]) -> list[list[Difference]]:
    """Group the differences whose fields differ in numbers alone and that have the same values."""
    alike: dict[object, list[Difference]] = {}
    for each in found:
        values = [pattern(value) if value and each.field in PLACES else value for value in (each.a, each.b)]
        members = frozenset(map(pattern, each.members))
        alike.setdefault((pattern(each.where), pattern(each.field), *values, members), []).append(each)
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
