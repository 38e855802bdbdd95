"""Results go to stdout, prose to stderr; errors become one message and an exit code."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from primeslurm.errors import PrimeslurmError, UsageError

PIPE_COLUMNS = 240
"""Width of what goes to no terminal: a name that is broken into two lines is found by no grep."""

_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
out = Console(highlight=False, soft_wrap=False, width=PIPE_COLUMNS if _piped else None)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout. JSON has no word for numbers that are not finite: they become null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def light_table(*columns: str, title: str | None = None) -> Table:
    """A table without lines, which leaves 80 columns to what it says."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def count(number: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def note(text: str) -> None:
    """Prose for a person."""
    err.print(text, markup=False)


def report_json(error: PrimeslurmError) -> None:
    """An error as JSON on stdout, for scripts that asked for JSON."""
    violations = error.violations if isinstance(error, UsageError) else ()
    print_json({"error": str(error), "exit_code": error.exit_code, "violations": [asdict(v) for v in violations]})


def report(error: PrimeslurmError) -> None:
    """An error as one message on stderr, all its violations below one another."""
    lines = [str(v) for v in error.violations] if isinstance(error, UsageError) else str(error).splitlines()
    if len(lines) == 1:
        note(f"error: {lines[0]}")
        return
    note(f"error: {len(lines)} problems" if isinstance(error, UsageError) else f"error: {lines[0]}")
    for line in lines if isinstance(error, UsageError) else lines[1:]:
        note(f"  {line}")
