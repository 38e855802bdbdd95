"""Removes shared memory of killed processes: files in /dev/shm use the node's memory until somebody unlinks them.

A killed engine leaves its KV cache there (hundreds of GB with offload), workers leave queues, and Python leaves
semaphores. A file is removed if a process of a killed group was seen to map it, and no process maps it now.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

import psutil

DIRECTORY = Path("/dev/shm")
_POLL_S = 0.05

Inode = int


class SharedMemory:
    """Files in /dev/shm that the process groups of a node have mapped."""

    def __init__(self) -> None:
        self._mapped: dict[int, set[Inode]] = {}  # by process group
        self._left: set[Inode] = set()

    def scan(self, groups: Collection[int]) -> None:
        """Note what process groups have mapped. Dead processes have no maps, so call this before they are killed."""
        for group, inodes in mapped_by(groups).items():
            self._mapped.setdefault(group, set()).update(inodes)

    def ended(self, group: int) -> None:
        """Note that a process group was killed. Its files may be removed from now on."""
        self._left |= self._mapped.pop(group, set())

    def unlink(self) -> bool:
        """Remove the files of killed groups that no process maps. Return whether none are left."""
        names = names_of(self._left)
        used = set[Inode]().union(*map(_maps, psutil.pids())) if names else set()
        for path, inode in names.items():
            if inode not in used:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._left &= used.intersection(names.values())
        return not self._left

    def unlink_within(self, timeout_s: float) -> bool:
        """Repeat `unlink` until no files are left: killed processes take a moment to release their memory."""
        deadline = time.monotonic() + timeout_s
        while not (done := self.unlink()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return done


def mapped_by(groups: Collection[int]) -> dict[int, set[Inode]]:
    mapped: dict[int, set[Inode]] = {}
    for pid in psutil.pids() if groups else ():
        with contextlib.suppress(ProcessLookupError):
            if (group := os.getpgid(pid)) in groups:
                mapped.setdefault(group, set()).update(_maps(pid))
    return mapped


def names_of(inodes: Collection[Inode]) -> dict[Path, Inode]:
    """Return the paths in /dev/shm of these files, if they belong to this user."""
    names: dict[Path, Inode] = {}
    for path in DIRECTORY.iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_ino in inodes and status.st_uid == os.geteuid():
                names[path] = status.st_ino
    return names


def _maps(pid: int) -> set[Inode]:
    # By inode, which psutil does not report: a name may have been unlinked, or belong to another file by now.
    try:
        device = DIRECTORY.stat().st_dev
        wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
        # Bytes, because file names need not be valid text.
        fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n") if line)
        return {int(field[4]) for field in fields if field[3] == wanted}
    except OSError:  # the process has ended or belongs to another user
        return set()
