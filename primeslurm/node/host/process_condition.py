"""Conditions that keep a process from running, according to /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NS_PER_S = 1e9
_STOPPED, _DISK = "T", "D"


class Condition(NamedTuple):
    """Condition of a process and its children."""

    stopped: bool = False  # by a signal (SIGSTOP)
    held: bool = False  # by a debugger, or in an uninterruptible system call: a disk, a file system, a driver
    waited_s: float = 0.0  # total time that the main threads could run but had no CPU


def condition_of(pid: int, proc: Path = Path("/proc")) -> Condition:
    """Return the condition of a process and of its descendants in the same process group, combined.

    For example, an engine's server waits for its engine core, which is a child process.
    """
    conditions = [_condition(proc / str(each)) for each in _family(pid, proc)]
    return Condition(
        any(c.stopped for c in conditions), any(c.held for c in conditions), sum(c.waited_s for c in conditions)
    )


def _condition(directory: Path) -> Condition:
    try:
        lines = (directory / "status").read_text(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        state, tracer = fields["State"].split()[0], int(fields["TracerPid"])
    except (OSError, ValueError, KeyError, IndexError):  # the process has ended
        return Condition()
    return Condition(state == _STOPPED, tracer != 0 or state == _DISK, _waited_s(directory / "schedstat"))


def _family(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for child in _children(proc / str(pid)):
        if _group(child) == _group(pid):
            yield from _family(child, proc)


def _children(directory: Path) -> list[int]:
    try:
        tasks = list((directory / "task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # the process has ended, or the kernel lists no children (CONFIG_PROC_CHILDREN)
        return []


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _waited_s(path: Path) -> float:
    try:
        return int(path.read_text().split()[1]) / NS_PER_S
    except (OSError, ValueError, IndexError):  # the kernel does not count it
        return 0.0
