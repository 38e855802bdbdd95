"""`primeslurm doctor` without a run: what is installed on which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from primeslurm.api.installed import Installed
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.tables import out
from primeslurm.hostlists import compress
from primeslurm.slurm import inventory


def show_installed(found: Installed, as_json: bool) -> None:
    """What nodes have, and what of it is missing or another version."""
    if as_json:
        print_json({"nodes": found.nodes, "differences": [asdict(each) for each in found.differences]})
    else:
        _show(found.nodes, found.differences)


def _show(nodes: Mapping[str, inventory.Parts | None], wrong: Sequence[inventory.InstalledDifference]) -> None:
    """One row a part; nodes that have the same share a column."""
    marked = {(each.node, each.part): each for each in wrong}
    columns: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for name, found in nodes.items():
        columns.setdefault(tuple((found or {"node": "down"}).items()), []).append(name)
    table = Table("part", *(compress(names) for names in columns.values()))
    for part in dict.fromkeys(part for parts in columns for part, _ in parts):
        cells = []
        for parts, names in columns.items():
            value, difference = dict(parts).get(part), marked.get((names[0], part))
            text = value or "-"
            if difference is not None:
                text += f" (locked: {difference.wanted})" if difference.wanted else " (required)"
            cells.append(Text(text, style="red" if difference else ""))
        table.add_row(part, *cells)
    out.print(table)
    for each in wrong:
        locked = f", locked {each.wanted}" if each.wanted else ""
        note(f"{each.node}: {each.part} is {each.found or 'missing'}{locked}")
