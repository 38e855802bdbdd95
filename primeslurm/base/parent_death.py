"""Ends a process when its parent dies."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
# Loaded at import: between fork and exec another thread may have held the loader's locks.
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies. The setting survives exec; children do not inherit it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
