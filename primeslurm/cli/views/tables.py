"""What is printed in colours and columns. Separate from plain output, as rich takes long to import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from primeslurm.cli.output import plain

PIPE_COLUMNS = 240
"""Width of what goes to no terminal: a name that is broken into two lines is found by no grep."""


class PlainConsole(Console):
    """A Console on which texts control neither the terminal nor colours: `[red]` in an error is no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; what rich itself uses to control the terminal stays."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
out = PlainConsole(soft_wrap=False, width=PIPE_COLUMNS if _piped else None)
err = PlainConsole(stderr=True, soft_wrap=True)


def light_table(*columns: str, title: str | None = None) -> Table:
    """Make a table without lines, which leaves 80 columns to what it says."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
