"""Ends sandboxes that use too much, where no control group holds them.

Processes of a sandbox are all that descend from its first one: orphans stay there. Their threads and resident memory
are in files that everybody may read, so a program cannot hide them. They are looked at a few times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primeslurm.orchestrator.environments.sandbox.bwrap_sandbox import Sandbox

PERIOD_S = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Use:
    """What the processes of a sandbox use together: threads, and bytes of resident memory (shared pages each time)."""

    threads: int
    resident: int
    pids: tuple[int, ...]


def uses(first: Collection[int]) -> dict[int, Use]:
    """Look at sandboxes, each named by the pid of its first process."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Bytes: a program may have a name that is no text, and would be skipped with all that it has started.
                fields = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                sizes[int(entry.name)] = int(fields[17]), int(fields[21]) * _PAGE
    return {pid: _sum(pid, children, sizes) for pid in first}


def _sum(first: int, children: dict[int, list[int]], sizes: dict[int, tuple[int, int]]) -> Use:
    found, waiting = [], [first]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    used = [sizes.get(pid, (0, 0)) for pid in found]
    return Use(sum(threads for threads, _ in used), sum(resident for _, resident in used), tuple(found))


def proportional(use: Use) -> int:
    """Bytes of memory with shared pages counted once; resident size of processes that do not let us look closer."""
    total = 0
    for pid in use.pids:
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
            total += int(next(line for line in lines if line.startswith(b"Pss:")).split()[1]) * 1024
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


async def watching(boxes: Collection[Sandbox]) -> None:
    """Look at all sandboxes until there are none, and end those that use more than they may."""
    while boxes:
        await asyncio.sleep(PERIOD_S)
        by_pid = {box.first_pid: box for box in list(boxes) if box.first_pid and not box.ended_for}
        for pid, use in (await asyncio.to_thread(uses, by_pid)).items():
            box = by_pid[pid]
            if use.threads > box.allowed.processes:
                box.kill(f"it had {use.threads} processes, {box.allowed.processes} are allowed")
            elif use.resident > box.allowed.memory:
                memory = await asyncio.to_thread(proportional, use)
                if memory > box.allowed.memory:
                    box.kill(f"it took {memory / 1e9:.1f} GB of memory, {box.allowed.memory / 1e9:.1f} are allowed")
