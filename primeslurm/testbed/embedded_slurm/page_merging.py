"""Shares equal memory pages between processes (KSM), so that hundreds of similar processes fit on one machine.

An administrator enables it with `echo 1 > /sys/kernel/mm/ksm/run`. The kernel then merges pages of processes that
request it, and of their children. Two Python processes only have equal pages if neither addresses nor string hashes
are randomised.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

SWITCH = Path("/sys/kernel/mm/ksm/run")
# Environment variables of the processes.
SAME_HASHES = {"PYTHONHASHSEED": "0"}
_PR_SET_MEMORY_MERGE = 67
_ADDR_NO_RANDOMIZE = 0x0040000
# Loaded at import: between fork and exec another thread may have held the loader's locks.
_LIBC = ctypes.CDLL(None, use_errno=True)


def are_merged() -> bool:
    """Return whether page merging is enabled on this machine."""
    try:
        return SWITCH.read_text().strip() == "1"
    except OSError:
        return False


def ask() -> None:
    """Request page merging for the program that this process executes next, and for its children.

    Raises:
        OSError: the kernel refuses, for example because it is older than Linux 6.4.
    """
    if _LIBC.prctl(_PR_SET_MEMORY_MERGE, 1, 0, 0, 0) or _LIBC.personality(_ADDR_NO_RANDOMIZE) < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not merge this process's pages")
