"""Processes and code without coverage measurement."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def measuring() -> dict[str, str]:
    """Return the environment variables that make coverage measure child processes."""
    return {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}


def unmeasured() -> dict[str, str]:
    """Return this process's environment without coverage measurement.

    Measuring slows engines and trainers down by half, and hundreds of small processes even more. The tests of single
    modules measure what whole runs execute.
    """
    measured = measuring()
    return {name: value for name, value in os.environ.items() if name not in measured}


@contextmanager
def untraced() -> Iterator[None]:
    """Measure nothing of this thread."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)
