"""Write the tables of keys into docs/migration/; with --check, only report whether the pages are current.

The tables are those by which `check` explains a key of another tool, so that pages and messages agree.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from primeslurm.recipe.reading.alias_table import ALIASES, TOOLS, Tool

PAGES = Path(__file__).resolve().parents[1] / "docs" / "migration"
BLOCK = re.compile(r"(<!-- keys: ([\w-]+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)


def table(tool: Tool) -> str:
    """Return the keys of a tool, the fields of a recipe in their place, and what to know of them."""
    lines = [f"| {TOOLS[tool]} | primeslurm | Note |", "|---|---|---|"]
    for alias in ALIASES:
        if keys := alias.keys.get(tool):
            place = " (site file)" if alias.of_site else ""
            theirs = ", ".join(f"`{key}`" for key in keys)
            lines.append(f"| {theirs} | `{alias.field.removeprefix('site: ')}`{place} | {alias.note} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the migration pages with current tables."""
    tools: dict[str, Tool] = {tool: tool for tool in TOOLS}
    return {
        path: BLOCK.sub(lambda block: block[1] + table(tools[block[2]]) + block[3], path.read_text())
        for path in sorted(PAGES.glob("*.md"))
    }


def main() -> None:
    """Write or check the pages; exit code 1 if one is not current."""
    current = pages()
    stale = [path for path, text in current.items() if path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"run `./just docs`: not current: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.write_text(current[path])


if __name__ == "__main__":
    main()
