"""Faster imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection while large packages are imported, and exclude their objects from later ones."""
    # torch, vLLM and verifiers create millions of objects that live until the process ends. Without collections over
    # them, these imports take a quarter less time.
    if not gc.isenabled():  # nested
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
