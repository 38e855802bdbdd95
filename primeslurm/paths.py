"""Paths as users write them. Looking at one raises nothing: what cannot be looked at is not there."""

from __future__ import annotations

import contextlib
from pathlib import Path

from primeslurm import files


def expanded(path: str | Path) -> Path:
    """With `~` and `~user` replaced; as it is where no such home is known."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def is_dir(path: Path) -> bool:
    """Whether there is a directory that may be looked at."""
    with contextlib.suppress(OSError):
        return files.is_dir(path)
    return False


def is_file(path: Path) -> bool:
    """Whether there is a file that may be looked at."""
    with contextlib.suppress(OSError):
        return files.is_file(path)
    return False
