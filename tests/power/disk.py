"""An ext4 file system in a file, which is stopped as by a power cut: unflushed data is lost."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN in the kernel's fs/ext4/ext4.h."""
NO_LOG_FLUSH = struct.pack("I", 2)
"""EXT4_GOING_FLAGS_NOLOGFLUSH: nothing more is written, not even the journal."""
BYTES = 256 << 20
OPTIONS = (
    "data=writeback,noauto_da_alloc,commit=300",  # nothing is written unless it is flushed
    "data=writeback,noauto_da_alloc,commit=1",  # names are on disk before their content
    "data=ordered,commit=1",
)


def unavailable() -> str:
    """Return why this machine does not support it; empty if it does."""
    if os.geteuid():
        return "only root can mount a file system"
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    return ""


class Disk:
    """A file system below a directory. `options` are mount options."""

    def __init__(self, place: Path, options: str) -> None:
        self._file, self.path, self._options = place / "disk.img", place / "disk", options

    def make(self) -> None:
        """Create it, empty, and mount it. Raise CalledProcessError."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        with self._file.open("wb") as file:
            file.truncate(BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._file))
        self._mount()

    def flush(self) -> None:
        """Flush all writes so far."""
        _run("sync", "-f", str(self.path))

    def cut(self) -> None:
        """Cut the power: nothing is written any longer, and every call fails."""
        handle = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(handle, SHUTDOWN, NO_LOG_FLUSH)
        os.close(handle)

    def restart(self) -> None:
        """Mount a copy of the data that survived, because sandboxes may keep the old mount."""
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
