"""No orphans: a process that ends when the one that started it does, however that was ended."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
# Loaded here, and not in a child that has executed nothing yet: another thread may have held its locks at the fork.
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent is gone. It outlives an exec; children do not have it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
