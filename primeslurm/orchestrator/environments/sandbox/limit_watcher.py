"""Kills sandboxes that use too much, on hosts where no control groups enforce the limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from primeslurm.orchestrator.environments.sandbox.bwrap_sandbox import Sandbox

INTERVAL_S = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Threads and memory of all processes of a sandbox."""

    threads: int
    resident: int  # Resident memory [bytes]; a page that several processes share counts once for each
    pids: tuple[int, ...]


def measure_usage(first_pids: Collection[int]) -> dict[int, Usage]:
    """Measure sandboxes, each given by its first process."""
    # All descendants of the first process belong to the sandbox, because it adopts orphans. The numbers come from files
    # that every user may read, so a program cannot hide them.
    children: dict[int, list[int]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Parse bytes: a program may choose a name that is not text, to be skipped with all its children.
                fields = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                sizes[int(entry.name)] = int(fields[17]), int(fields[21]) * _PAGE
    return {pid: _usage_below(pid, children, sizes) for pid in first_pids}


def _usage_below(first: int, children: dict[int, list[int]], sizes: dict[int, tuple[int, int]]) -> Usage:
    pids, queue = [], [first]
    while queue:
        pid = queue.pop()
        pids.append(pid)
        queue += children.get(pid, [])
    used = [sizes.get(pid, (0, 0)) for pid in pids]
    return Usage(sum(threads for threads, _ in used), sum(resident for _, resident in used), tuple(pids))


def proportional_memory(usage: Usage) -> int:
    """Return the memory [bytes] with shared pages counted once. Unreadable processes count with their resident size."""
    total = 0
    for pid in usage.pids:
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
            total += int(next(line for line in lines if line.startswith(b"Pss:")).split()[1]) * 1024
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


async def watch(sandboxes: Collection[Sandbox]) -> None:
    """Kill sandboxes that use more than they may, until there are no sandboxes left."""
    while sandboxes:
        await asyncio.sleep(INTERVAL_S)
        # One scan of /proc serves all sandboxes, in a thread because hosts may have thousands of processes.
        by_pid = {each.first_pid: each for each in list(sandboxes) if each.first_pid and not each.end_reason}
        for pid, usage in (await asyncio.to_thread(measure_usage, by_pid)).items():
            sandbox = by_pid[pid]
            if usage.threads > sandbox.allowed.processes:
                sandbox.kill(f"it had {usage.threads} processes, and {sandbox.allowed.processes} are allowed")
            elif usage.resident > sandbox.allowed.memory:
                # The exact number is slow to read, so it is read only if the upper bound is too high.
                memory = await asyncio.to_thread(proportional_memory, usage)
                if memory > sandbox.allowed.memory:
                    allowed = sandbox.allowed.memory / 1e9
                    sandbox.kill(f"it used {memory / 1e9:.1f} GB of memory, and {allowed:.1f} GB are allowed")
