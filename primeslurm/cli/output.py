"""Results go to stdout, prose to stderr; errors become one message and an exit code."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from primeslurm.errors import PrimeslurmError, UsageError

P = ParamSpec("P")
R = TypeVar("R")

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def note(text: str) -> None:
    """Prose for a person."""
    err.print(text, markup=False)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn a PrimeslurmError into its message on stderr and its exit code."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PrimeslurmError as error:
            _report(error)
            raise typer.Exit(error.exit_code) from None

    return wrapper


def _report(error: PrimeslurmError) -> None:
    lines = [str(v) for v in error.violations] if isinstance(error, UsageError) else str(error).splitlines()
    if len(lines) == 1:
        note(f"error: {lines[0]}")
        return
    note(f"error: {len(lines)} problems" if isinstance(error, UsageError) else f"error: {lines[0]}")
    for line in lines if isinstance(error, UsageError) else lines[1:]:
        note(f"  {line}")
