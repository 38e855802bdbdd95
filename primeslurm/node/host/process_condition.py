"""What keeps a process of this machine from running, as the kernel has it (/proc)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

NS_PER_S = 1e9
_STOPPED, _DISK = "T", "D"


class Condition(NamedTuple):
    """A process at one moment."""

    stopped: bool = False
    """By a signal (SIGSTOP)."""
    held: bool = False
    """By a debugger, or in a call of the kernel that cannot be interrupted: a disk, a file system, a driver."""
    waited_s: float = 0.0
    """Time that its main thread was able to run, but had no CPU, since it began."""


def condition_of(pid: int, proc: Path = Path("/proc")) -> Condition:
    """Look at a process; one that is gone is in no special condition."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        state, tracer = fields["State"].split()[0], int(fields["TracerPid"])
    except (OSError, ValueError, KeyError, IndexError):
        return Condition()
    return Condition(state == _STOPPED, tracer != 0 or state == _DISK, _waited_s(proc / str(pid) / "schedstat"))


def _waited_s(path: Path) -> float:
    """0 on kernels that do not count it."""
    try:
        return int(path.read_text().split()[1]) / NS_PER_S
    except (OSError, ValueError, IndexError):
        return 0.0
