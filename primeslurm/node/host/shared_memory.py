"""Shared memory that outlives killed processes: names in /dev/shm fill the node's memory until somebody unlinks them.

A killed engine leaves its KV cache in host memory there (hundreds of GB where it is offloaded), workers their queues,
Python's semaphores their names. Only what processes of a group were seen to have mapped is removed, once nobody has it
mapped.
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
    """What the processes of a node's process groups have mapped in /dev/shm."""

    def __init__(self) -> None:
        self._seen: dict[int, set[Inode]] = {}
        self._left: set[Inode] = set()

    def look(self, groups: Collection[int]) -> None:
        """Take note of what groups have mapped now. For before they may be killed: dead processes have no maps."""
        for group, inodes in mapped_by(groups).items():
            self._seen.setdefault(group, set()).update(inodes)

    def ended(self, group: int) -> None:
        """Take note that a group was killed: from now on what it had mapped is left over."""
        self._left |= self._seen.pop(group, set())

    def unlink(self) -> bool:
        """Remove the names of what is left over and that no living process has mapped. Returns whether that was all."""
        names = names_of(self._left)
        used = set[Inode]().union(*map(_maps, psutil.pids())) if names else set()
        for path, inode in names.items():
            if inode not in used:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._left &= used.intersection(names.values())
        return not self._left

    def unlink_within(self, timeout_s: float) -> bool:
        """Call `unlink` until that was all: what is killed lets go of its memory a moment later.

        Args:
            timeout_s: longest time for that, in seconds.

        Returns:
            Whether it was all.
        """
        deadline = time.monotonic() + timeout_s
        while not (done := self.unlink()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return done


def mapped_by(groups: Collection[int]) -> dict[int, set[Inode]]:
    """Find files of /dev/shm that the processes of each process group have mapped, whatever their names are now."""
    found: dict[int, set[Inode]] = {}
    for pid in psutil.pids() if groups else ():
        with contextlib.suppress(ProcessLookupError):
            if (group := os.getpgid(pid)) in groups:
                found.setdefault(group, set()).update(_maps(pid))
    return found


def names_of(inodes: Collection[Inode]) -> dict[Path, Inode]:
    """Find names in /dev/shm that these files still have, of this user's."""
    found: dict[Path, Inode] = {}
    for path in DIRECTORY.iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            status = path.stat(follow_symlinks=False)
            if status.st_ino in inodes and status.st_uid == os.geteuid():
                found[path] = status.st_ino
    return found


def _maps(pid: int) -> set[Inode]:
    """What one process has mapped; nothing if it is gone or somebody else's.

    By inode, which psutil does not tell: a name may have been unlinked, or be another file's by now.
    """
    try:
        device = DIRECTORY.stat().st_dev
        wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
        # Bytes: names of files need be no text.
        fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n") if line)
        return {int(field[4]) for field in fields if field[3] == wanted}
    except OSError:
        return set()
