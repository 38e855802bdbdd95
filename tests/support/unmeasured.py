"""What is run without its coverage being measured: processes, and much of what a test itself does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def measuring() -> dict[str, str]:
    """Return what in this process's environment has its children measured."""
    return {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}


def unmeasured() -> dict[str, str]:
    """Return this process's environment without what has its children measured.

    Measuring slows engines and trainers down by half, and hundreds of small processes even more; what a whole run does
    is measured where the tests of its parts do it.
    """
    measured = measuring()
    return {name: value for name, value in os.environ.items() if name not in measured}


@contextmanager
def untraced() -> Iterator[None]:
    """Have nothing of this thread measured."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)
