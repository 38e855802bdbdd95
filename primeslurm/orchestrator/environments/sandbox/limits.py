"""How much one sandbox may use, and what holds it to that.

Control groups hold memory, processes and cores exactly, where this user may make any. Elsewhere the kernel's limits for
single processes stand in (RLIMIT_DATA for private memory; RLIMIT_NPROC, which since Linux 5.14 counts a sandbox's own
processes, but not for root), and `watch` ends a sandbox whose processes are too many or too large together.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from primeslurm.recipe.sections.sandboxes import SUBPROCESS_DISK_GB, SUBPROCESS_MEMORY_GB

GB = 10**9
_NAME = "primeslurm-"


@dataclass(frozen=True)
class SandboxLimits:
    """What all programs of one sandbox may use together. Sizes in bytes."""

    cpus: float | None = None
    memory: int = round(SUBPROCESS_MEMORY_GB * GB)
    disk: int = round(SUBPROCESS_DISK_GB * GB)
    processes: int = 256
    open_network: bool = False

    def for_processes(self, group: ControlGroup | None) -> dict[str, int]:
        """Limits of each single process, by their names in Python's `resource`."""
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.disk, "RLIMIT_MSGQUEUE": 0}
        if group is None or not group.holds("memory"):
            limits["RLIMIT_DATA"] = self.memory
        if (group is None or not group.holds("pids")) and _counts_by_namespace():
            limits["RLIMIT_NPROC"] = self.processes
        return limits


def _counts_by_namespace() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


@dataclass(frozen=True)
class ControlGroup:
    """The control groups of one sandbox: directory by controller; with version 2 they are one and the same."""

    directories: dict[str, Path]

    def holds(self, controller: str) -> bool:
        """Whether a controller is among them."""
        return controller in self.directories

    @property
    def doors(self) -> list[str]:
        """The files that a process enters by writing its pid to them."""
        return [str(path / "cgroup.procs") for path in dict.fromkeys(self.directories.values())]

    def limit(self, limits: SandboxLimits) -> None:
        """Set the limits. Files in memory count as memory, so their share comes on top."""
        memory = limits.memory + limits.disk
        values = {
            "memory": {"memory.max": memory, "memory.swap.max": 0, "memory.limit_in_bytes": memory},
            "pids": {"pids.max": limits.processes},
            "cpu": {},
        }
        if limits.cpus is not None:
            quota = round(100_000 * limits.cpus)
            values["cpu"] = {"cpu.max": f"{quota} 100000", "cpu.cfs_quota_us": quota}  # type: ignore[dict-item]
        for controller, directory in self.directories.items():
            for name, value in values[controller].items():
                with contextlib.suppress(FileNotFoundError, PermissionError):  # the other version's name
                    if (directory / name).exists():
                        (directory / name).write_text(str(value))

    def remove(self, patience_s: float = 5.0) -> None:
        """Remove the groups, once their last process is gone."""
        deadline = time.monotonic() + patience_s
        for path in dict.fromkeys(self.directories.values()):
            while path.exists():
                try:
                    path.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.02)


def make_group(name: str) -> ControlGroup | None:
    """Make the control groups of a sandbox below those of this worker; None where that is not allowed."""
    made: dict[str, Path] = {}
    for controller, parent in _parents().items():
        path = parent / f"{_NAME}{os.getpid()}-{name}"
        with contextlib.suppress(OSError):
            path.mkdir(exist_ok=True)
            made[controller] = path
    return ControlGroup(made) if made else None


def remove_stale_groups() -> None:
    """Remove groups that workers left which were killed."""
    for parent in dict.fromkeys(_parents().values()):
        for path in parent.glob(f"{_NAME}*-*"):
            pid = path.name.removeprefix(_NAME).split("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    path.rmdir()


@functools.cache
def _parents() -> dict[str, Path]:
    """Where groups of each controller can be made, found by making one."""
    found: dict[str, Path] = {}
    for controllers, directory in _own():
        for candidate in (directory, directory.parent):
            trial = candidate / f"{_NAME}{os.getpid()}-trial"
            try:
                trial.mkdir()
            except OSError:
                continue
            try:
                (trial / "cgroup.procs").read_text()
                files = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}
                files["cpu"] = ("cpu.max", "cpu.cfs_quota_us")
                held = [c for c in controllers if any(os.access(trial / name, os.W_OK) for name in files[c])]
                found |= {c: candidate for c in held if c not in found}
            except OSError:
                held = []
            finally:
                trial.rmdir()
            if held:
                break
    return found


def _lines(path: str) -> list[str]:
    """Return the lines of a file of the kernel. Names of directories in it may be in any encoding."""
    return os.fsdecode(Path(path).read_bytes()).split("\n")[:-1]


def _own() -> Iterator[tuple[tuple[str, ...], Path]]:
    """This process's groups: controllers that may matter, and the directory."""
    mounts: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in _lines("/proc/self/mounts"):
            _, place, kind, options, *_ = line.split()
            for controller in ("memory", "pids", "cpu"):
                if kind == "cgroup" and controller in options.split(","):
                    mounts.setdefault(controller, Path(place))
            if kind == "cgroup2":
                mounts.setdefault("", Path(place))
        for line in _lines("/proc/self/cgroup"):
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                if name in mounts and path.startswith("/") and ".." not in path:
                    yield (name,) if name else ("memory", "pids", "cpu"), mounts[name] / path.lstrip("/")


def bubblewrap_works() -> str:
    """Why sandboxes cannot be made here; empty if they can."""
    import subprocess

    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (`bwrap`; the package is called bubblewrap)"
    trial = (
        "bwrap --unshare-user --disable-userns --unshare-pid --unshare-net --ro-bind / / --proc /proc --dev /dev true"
    )
    done = subprocess.run(
        trial.split(), capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=False
    )
    return "" if done.returncode == 0 else f"bubblewrap cannot make a sandbox: {done.stderr.strip()[-300:]}"
