"""Limits of a bubblewrap sandbox, and their enforcement.

Where this user may create control groups, these hold memory, processes and cores exactly. Elsewhere, resource limits of
single processes take their place (RLIMIT_DATA for private memory; RLIMIT_NPROC, which since Linux 5.14 counts per user
namespace, but not for root). `limit_watcher` then kills sandboxes whose processes together are too many or too large.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from primeslurm.recipe.sections.sandboxes import SUBPROCESS_DISK_GB, SUBPROCESS_MEMORY_GB

GB = 10**9
_GROUP_PREFIX = "primeslurm-"
# Files that set the limit of a controller, in version 2 and version 1 of control groups.
_CONTROLLER_FILES = {
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max",),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
}


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of all programs of one sandbox together. Sizes in bytes."""

    cpus: float | None = None
    memory: int = round(SUBPROCESS_MEMORY_GB * GB)
    disk: int = round(SUBPROCESS_DISK_GB * GB)
    processes: int = 256
    open_network: bool = False

    def rlimits(self, group: ControlGroup | None) -> dict[str, int]:
        """Return the limits of each single process, by their names in Python's `resource`."""
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.disk, "RLIMIT_MSGQUEUE": 0}
        if group is None or not group.holds("memory"):
            limits["RLIMIT_DATA"] = self.memory
        if (group is None or not group.holds("pids")) and _nproc_counts_by_namespace():
            limits["RLIMIT_NPROC"] = self.processes
        return limits


def _nproc_counts_by_namespace() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


@dataclass(frozen=True)
class ControlGroup:
    """The control groups of one sandbox, by controller. In version 2 all controllers share one directory."""

    directories: dict[str, Path]

    def holds(self, controller: str) -> bool:
        return controller in self.directories

    @property
    def procs_files(self) -> list[str]:
        """Files to which a process writes its pid to join."""
        return [str(path / "cgroup.procs") for path in dict.fromkeys(self.directories.values())]

    def limit(self, limits: SandboxLimits) -> None:
        """Write the limits. The sandbox's files are in memory, so the disk limit is added to the memory limit."""
        memory = limits.memory + limits.disk
        values: dict[str, dict[str, object]] = {
            "memory": {"memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory},
            "pids": {"pids.max": limits.processes},
            "cpu": {},
        }
        if limits.cpus is not None:
            quota = round(100_000 * limits.cpus)
            values["cpu"] = {"cpu.max": f"{quota} 100000", "cpu.cfs_quota_us": quota}
        for controller, directory in self.directories.items():
            for name, value in values[controller].items():
                with contextlib.suppress(FileNotFoundError, PermissionError):  # the other version's name
                    if (directory / name).exists():
                        (directory / name).write_text(str(value))

    def remove(self, timeout_s: float = 5.0) -> None:
        """Remove the groups once their last process has ended."""
        deadline = time.monotonic() + timeout_s
        for path in dict.fromkeys(self.directories.values()):
            while path.exists():
                try:
                    path.rmdir()
                except OSError:  # busy: the kernel removes killed processes from the group a little later
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)


def make_group(name: str) -> ControlGroup | None:
    """Create the control groups of a sandbox below those of this worker; None if this user may not."""
    directories: dict[str, Path] = {}
    for controller, parent in _parent_groups().items():
        path = parent / f"{_GROUP_PREFIX}{os.getpid()}-{name}"
        with contextlib.suppress(OSError):
            path.mkdir(exist_ok=True)
            directories[controller] = path
    return ControlGroup(directories) if directories else None


def remove_stale_groups() -> None:
    # Killed workers leave their groups. The name has the worker's pid.
    for parent in dict.fromkeys(_parent_groups().values()):
        for path in parent.glob(f"{_GROUP_PREFIX}*-*"):
            pid = path.name.removeprefix(_GROUP_PREFIX).split("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    path.rmdir()


@functools.cache
def _parent_groups() -> dict[str, Path]:
    """Return the directory below which this user can create groups of each controller. It tries to create one."""
    parents: dict[str, Path] = {}
    for controllers, directory in _groups_of_this_process():
        # A version 2 group that holds processes cannot enable controllers for its children, so also try its parent.
        for candidate in (directory, directory.parent):
            trial = candidate / f"{_GROUP_PREFIX}{os.getpid()}-trial"
            try:
                trial.mkdir()
            except OSError:
                continue
            try:
                (trial / "cgroup.procs").read_text()
                usable = [
                    controller
                    for controller in controllers
                    if any(os.access(trial / name, os.W_OK) for name in _CONTROLLER_FILES[controller])
                ]
                parents |= {controller: candidate for controller in usable if controller not in parents}
            except OSError:
                usable = []
            finally:
                trial.rmdir()
            if usable:
                break
    return parents


def _groups_of_this_process() -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield controllers and the directory of this process's group for them."""
    mounts: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in _kernel_lines("/proc/self/mounts"):
            _, mount_point, kind, options, *_ = line.split()
            for controller in _CONTROLLER_FILES:
                if kind == "cgroup" and controller in options.split(","):
                    mounts.setdefault(controller, Path(mount_point))
            if kind == "cgroup2":
                mounts.setdefault("", Path(mount_point))
        for line in _kernel_lines("/proc/self/cgroup"):
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                if name in mounts and path.startswith("/") and ".." not in path:
                    yield (name,) if name else tuple(_CONTROLLER_FILES), mounts[name] / path.lstrip("/")


def _kernel_lines(path: str) -> list[str]:
    # Names of directories in these files may be in any encoding.
    return os.fsdecode(Path(path).read_bytes()).split("\n")[:-1]


def bubblewrap_problem() -> str:
    """Say why bubblewrap cannot start a sandbox on this host; empty if it can."""
    # Many kernels and containers forbid user namespaces, so an installed bubblewrap may still fail.
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (command `bwrap`, package `bubblewrap`)"
    trial = (
        "bwrap --unshare-user --disable-userns --unshare-pid --unshare-net --ro-bind / / --proc /proc --dev /dev true"
    )
    result = subprocess.run(
        trial.split(), capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=False
    )
    return "" if result.returncode == 0 else f"bubblewrap cannot start a sandbox: {result.stderr.strip()[-300:]}"
