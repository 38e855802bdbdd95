"""Results go to stdout, prose to stderr; errors become one message and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from primeslurm.errors import PrimeslurmError, UsageError

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def note(text: str) -> None:
    """Prose for a person."""
    err.print(text, markup=False)


def report(error: PrimeslurmError) -> None:
    """An error as one message on stderr, all its violations below one another."""
    lines = [str(v) for v in error.violations] if isinstance(error, UsageError) else str(error).splitlines()
    if len(lines) == 1:
        note(f"error: {lines[0]}")
        return
    note(f"error: {len(lines)} problems" if isinstance(error, UsageError) else f"error: {lines[0]}")
    for line in lines if isinstance(error, UsageError) else lines[1:]:
        note(f"  {line}")
