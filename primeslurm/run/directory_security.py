"""Checks that no other user can change or replace a run directory.

Jobs run commands of the plan and load the agent's pickle from it. It has mode 0700, and is trusted only with that mode.
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
    """Return a violation for each way in which other users could replace a run directory, which may not exist yet."""
    return files.retrying(run_dir, lambda: _unsafe(run_dir))


def _unsafe(run_dir: Path) -> list[Violation]:
    violations = []
    if os.path.lexists(run_dir):
        used = run_dir.is_dir() and any(run_dir.iterdir())  # an empty directory gets mode 0700 when the run is created
        violations += [_violation(text, "take another name") for text in _problems(run_dir, closed=used)]
    parents = dict.fromkeys([*run_dir.absolute().parents, *run_dir.resolve().parents])
    for parent in (parent for parent in parents if parent.is_dir()):
        if files.swappable(parent):
            text = f"{parent} is world-writable without the sticky bit: other users could replace its contents"
            violations.append(_violation(text, f"chmod +t {parent}, or another directory of runs"))
    return violations


def pickle_problems(folder: Path) -> str:
    """Return why it is not safe to load the pickles of the run's `submitit` folder; empty if it is safe."""
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
    # `closed`: other users must not be able to write to the path, either.
    owner = path.lstat().st_uid
    if path.is_symlink() and owner not in (0, os.geteuid()):
        yield f"{path} is a link that belongs to user {owner}"
        return
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != _own_uid(path if stat.S_ISDIR(status.st_mode) else path.parent):
        yield f"{path} belongs to user {status.st_uid}"
    elif closed and mode & _OTHERS_WRITE:
        yield f"{path} is writable by other users (mode {mode:04o}); chmod go-w {path}"


def _own_uid(directory: Path) -> int:
    # File systems that map users may show this user's files with another uid. A new file shows which one.
    if directory.stat().st_uid == os.geteuid():
        return os.geteuid()
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:  # not writable, so it belongs to another user
        return os.geteuid()


def _violation(why: str, fix: str) -> Violation:
    return Violation("run directory", "", why, fix)
