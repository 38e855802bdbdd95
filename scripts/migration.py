"""Writes the tables of keys into docs/migration/. With --check, only reports whether the pages are current.

`check` explains keys of other tools from the same tables, so that pages and messages agree.
"""

from __future__ import annotations

import re
from pathlib import Path

from primeslurm.recipe.reading.aliases import aliases, tools, value_aliases
from scripts.generated import write_or_check

PAGES = Path(__file__).resolve().parents[1] / "docs" / "migration"
BLOCK = re.compile(r"(<!-- (keys|values): ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def keys(tool: str) -> str:
    """Return the keys of a tool, the corresponding recipe fields, and notes."""
    lines = [f"| {tools()[tool]} | primeslurm | Note |", "|---|---|---|"]
    for alias in aliases():
        if given := alias.keys.get(tool):
            place = " (site file)" if alias.of_site else ""
            theirs = ", ".join(f"`{key}`" for key in given)
            lines.append(f"| {theirs} | `{alias.field}`{place} | {alias.note} |")
    return "\n".join(lines) + "\n"


def values(tool: str) -> str:
    """Return values with other names here, for the fields that correspond to a tool's keys."""
    fields = {alias.field for alias in aliases() if tool in alias.keys}
    lines = ["| Field | Value elsewhere | Value here | Note |", "|---|---|---|---|"]
    for value in value_aliases():
        if value.field in fields:
            theirs = ", ".join(f"`{each}`" for each in value.theirs)
            lines.append(f"| `{value.field}` | {theirs} | `{value.ours}` | {value.note} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the migration pages with current tables."""
    tables = {"keys": keys, "values": values}
    return {
        path: BLOCK.sub(lambda block: block[1] + tables[block[2]](block[3]) + block[4], path.read_text())
        for path in sorted(PAGES.glob("*.md"))
    }


if __name__ == "__main__":
    write_or_check(pages())
