"""Separates an event loop's own lag from waits for a CPU."""

from __future__ import annotations

from pathlib import Path


def waited_s() -> float:
    """Return for how long this thread was ready to run but had no CPU, as the kernel counts it [s]."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
