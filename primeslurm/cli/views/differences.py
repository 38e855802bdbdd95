"""Differences of two plans for a person: a line of how many there are of what, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from primeslurm.cli.output import count
from primeslurm.cli.views.folding import fold, pattern
from primeslurm.cli.views.tables import light_table
from primeslurm.run.diff import Difference

LONGEST_VALUE = 80
"""Characters of a value that are shown; `--all` shows all."""
PLACES = ("node", "on")
"""Fields that say where a process runs: processes that all moved are one difference."""


def summary_of(found: Sequence[Difference]) -> str:
    """Say how many values differ in which parts."""
    parts = Counter(each.where for each in found)
    return f"{count(len(found), 'difference')}: " + ", ".join(f"{where} {number}" for where, number in parts.items())


def difference_table(a: str, b: str, found: Sequence[Difference], *, every: bool) -> Table:
    """Lay the differences side by side.

    Args:
        a: name of the first column of values.
        b: name of the second.
        found: the differences.
        every: one row each, with all members and whole values.
    """
    table = light_table("part", "field", a, b)
    for row in (_row([each], every) for each in found) if every else (_row(group, every) for group in _alike(found)):
        table.add_row(*row)
    return table


def _alike(found: Sequence[Difference]) -> list[list[Difference]]:
    """Differences of which one is told: of fields that differ in numbers alone, by the same values."""
    alike: dict[object, list[Difference]] = {}
    for each in found:
        values = [pattern(value) if value and each.field in PLACES else value for value in (each.a, each.b)]
        members = frozenset(map(pattern, each.members))
        alike.setdefault((pattern(each.where), pattern(each.field), *values, members), []).append(each)
    return list(alike.values())


def _row(group: Sequence[Difference], every: bool) -> tuple[str, str, str, str]:
    members = list(dict.fromkeys(name for each in group for name in each.members))
    names = members if every else fold(members)
    part = ", ".join(names) or _told([each.where for each in group], every)
    part += f" ({len(members)})" if len(members) > len(names) else ""
    one, other = ([each.a for each in group if each.a is not None], [each.b for each in group if each.b is not None])
    return part, _told([each.field for each in group], every), _told(one, every), _told(other, every)


def _told(texts: Sequence[str], every: bool) -> str:
    if not texts:
        return "-"
    text = ", ".join(fold(texts))
    return text if every or len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
