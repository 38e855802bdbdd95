"""Breaks an embedded cluster as hardware failures do."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from primeslurm.testbed.embedded_slurm.cluster import Cluster
from primeslurm.testbed.embedded_slurm.daemons import OsProcess
from tests.support.waiting import wait_until


def kill_node(cluster: Cluster, name: str) -> None:
    """Cut the power of a node: kill its slurmd, its step daemons and all their processes, and tell Slurm."""
    daemon = next(daemon for daemon in cluster.daemons if daemon.name == name)
    daemon.send(signal.SIGKILL)
    tasks = _tasks(cluster, name)
    parents = {_parent(pid) for pid in tasks}
    victims = sorted(tasks, key=_depth, reverse=True)
    victims += [pid for pid in parents if pid is not None and _comm(pid) == "slurmstepd"]
    processes = [process for pid in victims if (process := OsProcess.of("job", pid))]
    # Kill them all at once. Otherwise an srun or a step daemon would see the first death and end the others.
    # Children first: when a parent dies, the kernel wakes its stopped children with SIGHUP.
    for process in processes:
        process.send(signal.SIGSTOP)
    for process in processes:
        process.send(signal.SIGKILL)
    set_down(cluster.spec.slurm_conf, name, "lost power")


def revive_node(cluster: Cluster, name: str) -> None:
    """Start the slurmd of a killed node again. The node returns to service by itself."""
    _revive(cluster, name, "slurmd", "-N", name)


def set_down(slurm_conf: Path, node: str, reason: str) -> None:
    """Take a node away as an administrator does, which ends its jobs."""
    _slurm(slurm_conf, "scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")


def kill_controller(cluster: Cluster) -> None:
    next(daemon for daemon in cluster.daemons if daemon.name == "slurmctld").send(signal.SIGKILL)


def revive_controller(cluster: Cluster) -> None:
    """Start slurmctld again. It finds its jobs in its state directory."""
    _revive(cluster, "slurmctld", "slurmctld")


def warn(slurm_conf: Path, job_id: str) -> None:
    """Send SIGUSR2 to every task of a job, but not to its batch script, as before a time limit or a preemption."""
    _slurm(slurm_conf, "scancel", "--signal=USR2", job_id)


def limit_time(slurm_conf: Path, job_id: str, minutes: int) -> None:
    """Change a job's time limit, which counts from its start."""
    _slurm(slurm_conf, "scontrol", "update", f"jobid={job_id}", f"timelimit={minutes}")


def _slurm(slurm_conf: Path, *argv: str) -> None:
    subprocess.run(argv, env={**os.environ, "SLURM_CONF": str(slurm_conf)}, check=True)


def _revive(cluster: Cluster, name: str, *argv: str) -> None:
    pid_file = cluster.spec.directory / "pid" / name
    _slurm(cluster.spec.slurm_conf, *argv, "-f", str(cluster.spec.slurm_conf))
    started = wait_until(lambda: OsProcess.of(name, int(pid_file.read_text() or 0)))
    cluster.daemons[:] = [daemon for daemon in cluster.daemons if daemon.name != name] + [started]


def _tasks(cluster: Cluster, name: str) -> list[int]:
    variables = {f"SLURM_CONF={cluster.spec.slurm_conf}".encode(), f"SLURMD_NODENAME={name}".encode()}
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if variables <= set((path / "environ").read_bytes().split(b"\0")):
                pids.append(int(path.name))
        except OSError:
            continue
    return pids


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _depth(pid: int) -> int:
    """Return the number of ancestors of a process."""
    parent = _parent(pid)
    return 0 if not parent else 1 + _depth(parent)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
