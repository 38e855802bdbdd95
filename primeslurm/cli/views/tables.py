"""Consoles and tables. Separate from `output` because importing rich is slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from primeslurm.cli.output import plain

# Width of output that goes to no terminal: grep finds no name that is broken into two lines.
PIPE_COLUMNS = 240


class PlainConsole(Console):
    """A console without markup, on which texts cannot control the terminal: `[red]` in an error stays as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and keep only control characters that rich itself writes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
out = PlainConsole(soft_wrap=False, width=PIPE_COLUMNS if _piped else None)
err = PlainConsole(stderr=True, soft_wrap=True)


def light_table(*columns: str, title: str | None = None, indent: int = 0) -> Table:
    """Return a table without lines, which leaves more of 80 columns to the cells.

    `indent` is the number of spaces before each cell. The space between two columns is always 2.
    """
    padding = (0, 2 - indent, 0, indent) if indent else (0, 2, 0, 0)
    table = Table(title=title, title_justify="left", box=None, padding=padding)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
