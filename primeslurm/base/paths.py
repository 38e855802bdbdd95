"""Paths that users write, and paths of the files that ship with the package.

Unlike those of `files`, the checks here never raise: a path that cannot be read counts as missing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from primeslurm.base import files

REPOSITORY = "https://github.com/primeslurm/primeslurm"
_PACKAGE = Path(__file__).parents[1]
# Where pyproject.toml puts shipped files in a wheel.
_IN_WHEEL = _PACKAGE / "shipped"


def shipped(name: str) -> Path:
    """Return the path of a shipped file or directory, for example `recipes` or `requirements/gpu.txt`."""
    return (_PACKAGE.parent if in_checkout() else _IN_WHEEL) / name


def in_checkout() -> bool:
    """Return whether the package runs from a checkout, where `./just` exists and shipped files are at the root."""
    return not is_dir(_IN_WHEEL)


def expanded(path: str | Path) -> Path:
    """Return a path with `~` and `~user` replaced; unchanged if there is no such home."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def exists(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return files.exists(path)
    return False


def is_dir(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return files.is_dir(path)
    return False


def is_file(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return files.is_file(path)
    return False
