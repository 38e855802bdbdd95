"""Daemons of the embedded cluster as operating-system processes: identity, end, and what jobs left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class OsProcess:
    """A process that cannot be mistaken for a later one with the same pid."""

    name: str
    pid: int
    started: int
    """Start time in clock ticks since boot, from /proc/<pid>/stat.

    Not psutil's `create_time`, which moves with the clock of the machine: this is kept in a file, for weeks maybe.
    """

    @classmethod
    def of(cls, name: str, pid: int) -> OsProcess | None:
        """Find the running process `pid`, or None if there is none."""
        started = _started(pid)
        return None if started is None else cls(name, pid, started)

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs (a zombie does not)."""
        return _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)


def state_and_start(pid: int) -> tuple[str, int] | None:
    """Read a process's state and its start time in clock ticks since boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _started(pid: int) -> int | None:
    found = state_and_start(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def end(processes: Iterable[OsProcess], grace_s: float) -> None:
    """End processes: SIGTERM, wait, SIGKILL. Returns when all are gone."""
    processes = list(processes)
    for process in processes:
        process.send(signal.SIGTERM)
    if not _gone(processes, grace_s):
        for process in processes:
            process.send(signal.SIGKILL)
        _gone(processes, grace_s)


def _gone(processes: list[OsProcess], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def job_processes(slurm_conf: Path) -> list[OsProcess]:
    """Find the processes of jobs of the cluster with this slurm.conf, Slurm's step daemons included.

    This also finds what has left its step, which proctrack/linuxproc does not.
    """
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    ours = [other.pid for other in others if _is_task(other.pid, slurm_conf) or _is_step_daemon(other, slurm_conf)]
    return [process for process in (OsProcess.of("job", pid) for pid in ours) if process is not None]


def _is_task(pid: int, slurm_conf: Path) -> bool:
    """A job's environment names its cluster and the job.

    Read as it is: psutil ends at the first gap, which a process that writes its title over its environment makes.
    """
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = f"SLURM_CONF={slurm_conf}".encode() in environment
    return ours and any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)


def _is_step_daemon(process: psutil.Process, slurm_conf: Path) -> bool:
    """Recognise slurmstepd, which writes its title over its environment, but works in the directory of slurmd's log."""
    try:
        return bool(process.name() == "slurmstepd" and Path(process.cwd()) == slurm_conf.parent / "log")
    except psutil.Error:
        return False
