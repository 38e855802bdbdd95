"""Finds and ends the operating-system processes of an embedded cluster: its daemons and the processes of its jobs."""

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
    """A process, identified by pid and start time. A later process with the same pid is a different one."""

    name: str
    pid: int
    # Not psutil's `create_time`, which shifts with the machine's clock. This value may stay in a file for weeks.
    started: int
    """Start time from /proc/<pid>/stat [clock ticks since boot]."""

    @classmethod
    def of(cls, name: str, pid: int) -> OsProcess | None:
        """Return the running process `pid`; None if there is none."""
        started = _started(pid)
        return None if started is None else cls(name, pid, started)

    @property
    def alive(self) -> bool:
        """Whether this process is still running. A zombie is not."""
        return _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)


def state_and_start(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and start time [clock ticks since boot]; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses, which may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _started(pid: int) -> int | None:
    state_start = state_and_start(pid)
    return None if state_start is None or state_start[0] in "ZX" else state_start[1]


def end(processes: Iterable[OsProcess], grace_s: float) -> None:
    """End processes with SIGTERM, and after `grace_s` with SIGKILL. Wait until all have ended."""
    processes = list(processes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.send(number)
        if _wait_for_end(processes, grace_s):
            return


def _wait_for_end(processes: list[OsProcess], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.alive for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def job_processes(slurm_conf: Path) -> list[OsProcess]:
    """Return all processes of jobs on the cluster with this slurm.conf, including Slurm's step daemons.

    Unlike proctrack/linuxproc this also finds processes that have left their step.
    """
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    ours = [other.pid for other in others if _is_task(other.pid, slurm_conf) or _is_step_daemon(other, slurm_conf)]
    return [process for process in (OsProcess.of("job", pid) for pid in ours) if process is not None]


def _is_task(pid: int, slurm_conf: Path) -> bool:
    """Return whether a process belongs to a job of this cluster, according to its environment."""
    # psutil stops at the first gap, and a process that overwrites its title leaves gaps in its environment.
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = f"SLURM_CONF={slurm_conf}".encode() in environment
    return ours and any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)


def _is_step_daemon(process: psutil.Process, slurm_conf: Path) -> bool:
    # slurmstepd overwrites its environment with its title, but its working directory is that of slurmd's log.
    try:
        return bool(process.name() == "slurmstepd" and Path(process.cwd()) == slurm_conf.parent / "log")
    except psutil.Error:
        return False
