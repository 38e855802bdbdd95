"""Equal pages of memory that the kernel keeps once (KSM): hundreds of like processes on one machine then share most.

An administrator switches it on: `echo 1 > /sys/kernel/mm/ksm/run`. Only processes that ask for it are looked at, and
whatever they start. Pages of two Python processes are equal where both have laid out memory alike: their
addresses must not be random, nor the hashes of strings, which every string holds.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

SWITCH = Path("/sys/kernel/mm/ksm/run")
SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Of the environment of all processes that are to have equal pages."""
_PR_SET_MEMORY_MERGE = 67
_ADDR_NO_RANDOMIZE = 0x0040000
_LIBC = ctypes.CDLL(None, use_errno=True)  # here, and not in a child: another thread may hold its locks at the fork


def are_merged() -> bool:
    """Tell whether this machine's kernel merges pages of processes that ask for it."""
    try:
        return SWITCH.read_text().strip() == "1"
    except OSError:
        return False


def ask() -> None:
    """Have pages of what this process executes next merged, with all that it starts; it keeps its own as they are.

    Raises:
        OSError: the kernel refuses (before Linux 6.4 it knows no such wish).
    """
    if _LIBC.prctl(_PR_SET_MEMORY_MERGE, 1, 0, 0, 0) or _LIBC.personality(_ADDR_NO_RANDOMIZE) < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not merge this process's pages")
