"""Daemons of the embedded cluster as operating-system processes: identity, end, and what jobs left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same pid."""

    name: str
    pid: int
    started: int
    """Start time in clock ticks since boot, from /proc/<pid>/stat."""

    @classmethod
    def of(cls, name: str, pid: int) -> Process | None:
        """The running process `pid`, or None if there is none."""
        started = _started(pid)
        return None if started is None else cls(name, pid, started)

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs (a zombie does not)."""
        return _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def _started(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def end(processes: Iterable[Process], grace_s: float = 10.0) -> None:
    """End processes: SIGTERM, wait, SIGKILL. Returns when all are gone."""
    processes = list(processes)
    for process in processes:
        process.send(signal.SIGTERM)
    if not _gone(processes, grace_s):
        for process in processes:
            process.send(signal.SIGKILL)
        _gone(processes, grace_s)


def _gone(processes: list[Process], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def job_processes(slurm_conf: Path) -> list[Process]:
    """Processes of jobs of the cluster with this slurm.conf: their environment names it and a job id.

    This also finds what has left its step, which proctrack/linuxproc does not.
    """
    wanted = f"SLURM_CONF={slurm_conf}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment):
            process = Process.of("job", int(directory.name))
            if process is not None:
                found.append(process)
    return found
