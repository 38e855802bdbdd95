"""Whose a run directory is, and whether other users could put something else in its place.

What lies in it is run by its user: commands of the plan, the pickle of the agent. It is closed to others (mode 0700),
and trusted only while that is so.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from primeslurm.base import files
from primeslurm.base.errors import Violation

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_PASS = stat.S_IXGRP | stat.S_IXOTH


def permission_problems(run_dir: Path) -> list[Violation]:
    """Return a violation for each way in which others could replace a run directory, whether or not it is there yet."""
    return files.retrying(run_dir, lambda: _unsafe(run_dir))


def _unsafe(run_dir: Path) -> list[Violation]:
    found = []
    if os.path.lexists(run_dir):
        used = run_dir.is_dir() and any(run_dir.iterdir())  # an empty one is closed when it is taken
        found += [_violation(text, "take another name") for text in _problems(run_dir, closed=used)]
    parents = dict.fromkeys([*run_dir.absolute().parents, *run_dir.resolve().parents])
    for parent in (parent for parent in parents if parent.is_dir()):
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"{parent} may be written by everybody and is not sticky: others could replace what is in it"
            found.append(_violation(text, f"chmod +t {parent}, or another directory of runs"))
    return found


def pickle_problems(folder: Path) -> str:
    """Say why pickles of a folder of a run directory are not to be loaded; empty if they are this user's alone.

    Args:
        folder: `submitit` of the run directory.
    """
    try:
        return "; ".join(files.retrying(folder, lambda: _problems_of_pickles(folder)))
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"


def _problems_of_pickles(folder: Path) -> list[str]:
    run_dir = folder.parent
    opened = bool(run_dir.stat().st_mode & _OTHERS_PASS)
    below = [folder, *sorted(folder.glob("*.pkl"))]
    return [*_problems(run_dir), *(text for path in below for text in _problems(path, closed=opened))]


def _problems(path: Path, *, closed: bool = True) -> Iterator[str]:
    """Find what is wrong with a file or directory that is to be this user's.

    Args:
        path: of it.
        closed: others must not be able to write to it, either.
    """
    owner = path.lstat().st_uid
    if path.is_symlink() and owner not in (0, os.geteuid()):
        yield f"{path} is a link that user {owner} has made"
        return
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != _own_uid(path if stat.S_ISDIR(status.st_mode) else path.parent):
        yield f"{path} belongs to user {status.st_uid}"
    elif closed and mode & _OTHERS_WRITE:
        yield f"{path} may be written by others (mode {mode:04o}); chmod go-w {path}"


def _own_uid(directory: Path) -> int:
    """The uid that files of this user have on a file system: those that map users may show another than theirs."""
    if directory.stat().st_uid == os.geteuid():
        return os.geteuid()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:  # one may not write there: so it is somebody else's
        return os.geteuid()


def _violation(why: str, fix: str) -> Violation:
    return Violation("run directory", "", why, fix)
