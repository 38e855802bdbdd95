"""Break an embedded cluster the way hardware does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from primeslurm.testbed.embedded_slurm.cluster import Cluster
from primeslurm.testbed.embedded_slurm.daemons import OsProcess


def kill_node(cluster: Cluster, name: str) -> None:
    """A node loses power: its slurmd, the daemons of its steps and all that they run are gone, and Slurm finds out."""
    daemon = next(daemon for daemon in cluster.daemons if daemon.name == name)
    daemon.send(signal.SIGKILL)
    tasks = _tasks(cluster, name)
    parents = {_parent(pid) for pid in tasks}
    found = sorted(tasks, key=_depth, reverse=True)
    found += [pid for pid in parents if pid is not None and _comm(pid) == "slurmstepd"]
    processes = [process for pid in found if (process := OsProcess.of("job", pid))]
    # All at once, as without power: an srun or a step daemon would tell others of the first one's death, and end them.
    # Children first: when a parent dies, the kernel wakes those of its children that are stopped, and sends SIGHUP.
    for process in processes:
        process.send(signal.SIGSTOP)
    for process in processes:
        process.send(signal.SIGKILL)
    set_down(cluster.spec.slurm_conf, name, "lost power")


def revive_node(cluster: Cluster, name: str) -> None:
    """Start the slurmd of a killed node again; the node returns to service by itself."""
    _revive(cluster, name, "slurmd", "-N", name)


def set_down(slurm_conf: Path, node: str, reason: str) -> None:
    """A node is taken away, as an administrator does; what runs there is ended."""
    _slurm(slurm_conf, "scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")


def kill_controller(cluster: Cluster) -> None:
    """slurmctld is gone at once."""
    next(daemon for daemon in cluster.daemons if daemon.name == "slurmctld").send(signal.SIGKILL)


def revive_controller(cluster: Cluster) -> None:
    """Start a killed slurmctld again; it finds its jobs in its state directory."""
    _revive(cluster, "slurmctld", "slurmctld")


def warn(slurm_conf: Path, job_id: str) -> None:
    """USR2 to every task of a job, not to its batch script, as before a time limit or preemption."""
    _slurm(slurm_conf, "scancel", "--signal=USR2", job_id)


def limit_time(slurm_conf: Path, job_id: str, minutes: int) -> None:
    """Give a job another time limit, counted from its start, as an operator does."""
    _slurm(slurm_conf, "scontrol", "update", f"jobid={job_id}", f"timelimit={minutes}")


def _slurm(slurm_conf: Path, *argv: str) -> None:
    subprocess.run(argv, env={**os.environ, "SLURM_CONF": str(slurm_conf)}, check=True)


def _revive(cluster: Cluster, name: str, *argv: str) -> None:
    pid_file = cluster.spec.directory / "pid" / name
    _slurm(cluster.spec.slurm_conf, *argv, "-f", str(cluster.spec.slurm_conf))
    deadline = time.monotonic() + 60
    while (started := OsProcess.of(name, int(pid_file.read_text() or 0))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.daemons[:] = [daemon for daemon in cluster.daemons if daemon.name != name] + [started]


def _tasks(cluster: Cluster, name: str) -> list[int]:
    wanted = {f"SLURM_CONF={cluster.spec.slurm_conf}".encode(), f"SLURMD_NODENAME={name}".encode()}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _depth(pid: int) -> int:
    """Ancestors of a process."""
    parent = _parent(pid)
    return 0 if not parent else 1 + _depth(parent)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
