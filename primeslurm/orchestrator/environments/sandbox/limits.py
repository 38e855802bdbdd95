"""Limits of a bubblewrap sandbox.

Users may rarely create control groups. So the kernel limits each process (RLIMIT_DATA for private memory; RLIMIT_NPROC,
which since Linux 5.14 counts per user namespace, but not for root), and `limit_watcher` kills sandboxes whose processes
together are too many or too large.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
from dataclasses import dataclass

from primeslurm.recipe.sections.sandboxes import SUBPROCESS_DISK_GB, SUBPROCESS_MEMORY_GB

GB = 10**9


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of all programs of one sandbox together. Sizes in bytes."""

    cpus: float | None = None
    memory: int = round(SUBPROCESS_MEMORY_GB * GB)
    disk: int = round(SUBPROCESS_DISK_GB * GB)
    processes: int = 256
    open_network: bool = False

    def rlimits(self) -> dict[str, int]:
        """Return the limits of each single process, by their names in Python's `resource`."""
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": self.disk, "RLIMIT_MSGQUEUE": 0, "RLIMIT_DATA": self.memory}
        return limits | ({"RLIMIT_NPROC": self.processes} if _nproc_counts_by_namespace() else {})

    def cores(self) -> list[int]:
        """Choose the cores that programs run on. They may choose others, so this keeps only honest programs apart."""
        available = sorted(os.sched_getaffinity(0))
        return available if self.cpus is None else random.sample(available, min(len(available), math.ceil(self.cpus)))


def _nproc_counts_by_namespace() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


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
