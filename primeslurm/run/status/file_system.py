"""What keeps a run from writing its directory, as far as whoever looks at it can see."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_WRITTEN = (".", "agents", "events", "state")
"""Directories of an attempt that head, agents and processes write to all the time."""


def file_system_faults(directory: Path) -> list[str]:
    """Tell what keeps a run from writing its directory, as far as it can be seen from here without writing."""
    try:
        seen = os.statvfs(directory)
        parts = [part for name in _WRITTEN if (part := directory / name).exists()]
        modes = {part: stat.S_IMODE(part.stat().st_mode) for part in parts}
    except OSError as error:
        return [f"{directory} cannot be looked at from here: {error.strerror}"]
    found = []
    if seen.f_flag & os.ST_RDONLY:
        found.append(f"the file system of {directory} is read-only, as this machine sees it")
    if seen.f_blocks and seen.f_bavail == 0:
        found.append(f"the file system of {directory} is full")
    if seen.f_files and seen.f_favail == 0:
        found.append(f"the file system of {directory} has no room for another file (inodes)")
    closed = [f"{part} ({mode:04o})" for part, mode in modes.items() if not mode & stat.S_IWUSR]
    return [*found, *([f"their owner may not write to {', '.join(closed)}"] if closed else [])]
