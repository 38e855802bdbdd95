"""What is printed in colours and columns. Separate from plain output, as rich takes long to import."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 240
"""Width of what goes to no terminal: a name that is broken into two lines is found by no grep."""

_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
out = Console(highlight=False, soft_wrap=False, width=PIPE_COLUMNS if _piped else None)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def light_table(*columns: str, title: str | None = None) -> Table:
    """Make a table without lines, which leaves 80 columns to what it says."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
