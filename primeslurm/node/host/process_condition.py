"""What keeps a process of this machine from running, as the kernel has it (/proc)."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    """Time that its main thread (those of all, for several) was able to run, but had no CPU, since it began."""


def condition_of(pid: int, proc: Path = Path("/proc")) -> Condition:
    """Look at a process and at those that it has started in its own process group: what keeps them keeps it.

    An engine's server waits for its core, which is a process of its own. One that is gone is in no special condition.
    """
    found = [_condition(proc / str(each)) for each in _family(pid, proc)]
    return Condition(any(c.stopped for c in found), any(c.held for c in found), sum(c.waited_s for c in found))


def _condition(directory: Path) -> Condition:
    try:
        lines = (directory / "status").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        state, tracer = fields["State"].split()[0], int(fields["TracerPid"])
    except (OSError, ValueError, KeyError, IndexError):
        return Condition()
    return Condition(state == _STOPPED, tracer != 0 or state == _DISK, _waited_s(directory / "schedstat"))


def _family(pid: int, proc: Path) -> Iterator[int]:
    """The process alone, where the kernel does not list children (CONFIG_PROC_CHILDREN)."""
    yield pid
    for child in _children(proc / str(pid)):
        if _group(child) == _group(pid):
            yield from _family(child, proc)


def _children(directory: Path) -> list[int]:
    try:
        return [
            int(child) for task in (directory / "task").iterdir() for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _waited_s(path: Path) -> float:
    """0 on kernels that do not count it."""
    try:
        return int(path.read_text().split()[1]) / NS_PER_S
    except (OSError, ValueError, IndexError):
        return 0.0
