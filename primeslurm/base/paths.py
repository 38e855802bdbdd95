"""Paths as users write them, and paths of the files that ship with the package.

Looking at a path raises nothing: a file that cannot be looked at is not there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from primeslurm.base import files

REPOSITORY = "https://github.com/primeslurm/primeslurm"
_PACKAGE = Path(__file__).parent
_IN_WHEEL = _PACKAGE / "shipped"
"""pyproject.toml puts the directories of `shipped` here when it builds a wheel."""


def shipped(name: str) -> Path:
    """Return a file or directory that ships with the package, for example `recipes` or `requirements/gpu.txt`.

    In a checkout these files are at its root.
    """
    return (_PACKAGE.parent if in_checkout() else _IN_WHEEL) / name


def in_checkout() -> bool:
    """Tell whether the package runs from a checkout: then `./just` is there, and else it is not."""
    return not is_dir(_IN_WHEEL)


def expanded(path: str | Path) -> Path:
    """With `~` and `~user` replaced; as it is where no such home is known."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def exists(path: Path) -> bool:
    """Whether there is something that may be looked at."""
    with contextlib.suppress(OSError, ValueError):
        return files.exists(path)
    return False


def is_dir(path: Path) -> bool:
    """Whether there is a directory that may be looked at."""
    with contextlib.suppress(OSError, ValueError):
        return files.is_dir(path)
    return False


def is_file(path: Path) -> bool:
    """Whether there is a file that may be looked at."""
    with contextlib.suppress(OSError, ValueError):
        return files.is_file(path)
    return False
