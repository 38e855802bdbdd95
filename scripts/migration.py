"""Writes the tables of keys into docs/migration/. With --check, only reports whether the pages are current.

`check` explains keys of other tools from the same tables, so that pages and messages agree.
"""

from __future__ import annotations

import re
from pathlib import Path

from primeslurm.recipe.reading.alias_table import ALIASES, TOOLS, VALUE_ALIASES, Tool
from scripts.generated import write_or_check

PAGES = Path(__file__).resolve().parents[1] / "docs" / "migration"
BLOCK = re.compile(r"(<!-- (keys|values): ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def keys(tool: Tool) -> str:
    """Return the keys of a tool, the corresponding recipe fields, and notes."""
    lines = [f"| {TOOLS[tool]} | primeslurm | Note |", "|---|---|---|"]
    for alias in ALIASES:
        if given := alias.keys.get(tool):
            place = " (site file)" if alias.of_site else ""
            theirs = ", ".join(f"`{key}`" for key in given)
            lines.append(f"| {theirs} | `{alias.field.removeprefix('site: ')}`{place} | {alias.note} |")
    return "\n".join(lines) + "\n"


def values(tool: Tool) -> str:
    """Return values with other names here, for the fields that correspond to a tool's keys."""
    fields = {alias.field for alias in ALIASES if tool in alias.keys}
    lines = ["| Field | Value elsewhere | Value here | Note |", "|---|---|---|---|"]
    for value in VALUE_ALIASES:
        if value.field in fields:
            theirs = ", ".join(f"`{each}`" for each in value.theirs)
            lines.append(f"| `{value.field}` | {theirs} | `{value.ours}` | {value.note} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the migration pages with current tables."""
    tools: dict[str, Tool] = {tool: tool for tool in TOOLS}
    tables = {"keys": keys, "values": values}
    return {
        path: BLOCK.sub(lambda block: block[1] + tables[block[2]](tools[block[3]]) + block[4], path.read_text())
        for path in sorted(PAGES.glob("*.md"))
    }


if __name__ == "__main__":
    write_or_check(pages())
