"""An ext4 file system in a file, which is stopped as a power cut stops a disk: what was not flushed is gone."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

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
CUT = 99
"""Exit code of the process that cut the power."""
_WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


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
        """Mount what a power cut has left."""
        _run("umount", str(self.path))
        self._mount()

    def remove(self) -> None:
        """Unmount and delete it."""
        subprocess.run(["umount", str(self.path)], capture_output=True, check=False)
        self._file.unlink(missing_ok=True)

    def _mount(self) -> None:
        _run("mount", "-o", f"loop,{self._options}", str(self._file), str(self.path))


class Cutter:
    """Counts what this process, and those forked from it, do to a disk, and cuts the power at one of these moments."""

    def __init__(self, disk: Disk, at: int | None) -> None:
        self._disk, self._at = disk, at
        self._root = f"{disk.path}/"
        self._count = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        """How much was done so far."""
        return int.from_bytes(self._count[:8], "little")

    def watch(self) -> None:
        """Begin, for the rest of this process's life."""
        flush = os.fsync

        def fsync(handle: Any) -> None:
            self._moment()
            flush(handle)
            self._moment()

        os.fsync = fsync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) and self._ours(path):
                self._moment()
        elif event in _WRITES and any(self._ours(each) for each in arguments[:2]):
            self._moment()

    def _ours(self, path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self._root)

    def _moment(self) -> None:
        count = self.count + 1
        self._count[:8] = count.to_bytes(8, "little")
        if count == self._at:
            self._disk.cut()
            os._exit(CUT)


def _run(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, check=True)
