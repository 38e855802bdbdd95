"""An ext4 file system in a file, which is stopped as a power cut stops a disk: what was not flushed is gone."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN of the kernel's fs/ext4/ext4.h."""
NO_LOG_FLUSH = struct.pack("I", 2)
"""Nothing more is written, the journal neither: EXT4_GOING_FLAGS_NOLOGFLUSH."""
BYTES = 256 << 20
OPTIONS = (
    "data=writeback,noauto_da_alloc,commit=300",  # nothing is written that nobody flushes
    "data=writeback,noauto_da_alloc,commit=1",  # names are on disk before what they name
    "data=ordered,commit=1",
)


def unavailable() -> str:
    """Why this machine cannot do it; empty if it can."""
    if os.geteuid():
        return "only root can mount a file system"
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    return ""


class Disk:
    """One file system below a directory.

    Args:
        place: directory for its file and its mount point.
        options: of mount.
    """

    def __init__(self, place: Path, options: str) -> None:
        self._file, self.path, self._options = place / "disk.img", place / "disk", options

    def make(self) -> None:
        """Make it anew, empty, and mount it. Raises CalledProcessError."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        with self._file.open("wb") as file:
            file.truncate(BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._file))
        self._mount()

    def flush(self) -> None:
        """Have on disk what was written so far."""
        _run("sync", "-f", str(self.path))

    def cut(self) -> None:
        """Cut the power: from now on nothing is written, and every call fails."""
        handle = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(handle, SHUTDOWN, NO_LOG_FLUSH)
        os.close(handle)

    def restart(self) -> None:
        """Mount a copy of what a power cut has left: sandboxes that began meanwhile may have the old mount for long."""
        _run("umount", str(self.path))
        left = self._file.with_suffix(".left")
        _run("cp", "--sparse=always", str(self._file), str(left))
        left.rename(self._file)
        self._mount()

    def remove(self) -> None:
        """Unmount and delete it."""
        subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)
        self._file.unlink(missing_ok=True)

    def _mount(self) -> None:
        _run("mount", "-o", f"loop,{self._options}", str(self._file), str(self.path))


def _run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout
