"""Private directories in places where everybody may write, such as /tmp.

Names end in a random word, so nobody can make the directory first. The owner holds a lock as long as it runs, so that
clean-up by other agents and systemd-tmpfiles spares the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path

from primeslurm.base.files import LONGEST_SOCKET, swappable

WORD = 6  # letters of the random word. Paths of sockets must be short.
# Longest path of a directory for vLLM's sockets, whose names are UUIDs. [bytes]
LONGEST_FOR_SOCKETS = LONGEST_SOCKET - len("/01234567-89ab-cdef-0123-456789abcdef")
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def random_word() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(WORD))


class PrivateDirectory:
    """A directory that this process makes, locks and removes. A new directory has a `random_word` in its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def make(self) -> None:
        """Make the directory, accessible for this user only, and missing parents.

        Raises:
            OSError: it cannot be made, it exists, or other users may rename entries of its parent.
        """
        parent = self.path.parent
        parent.mkdir(parents=True, exist_ok=True)
        if swappable(parent):
            mode = f"{stat.S_IMODE(parent.stat().st_mode):04o}"
            why = f"may be written by everybody and is not sticky (mode {mode}): others could replace what is in it"
            raise OSError(f"{parent} {why}; chmod +t {parent}, or another directory")
        if os.path.lexists(self.path):
            raise FileExistsError(f"{self.path} is there already")
        # It gets its name after it is locked, so that clean-up finds it locked or not at all.
        hidden = parent / f".{self.path.name}"
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path)

    def remove(self) -> None:
        """Remove the directory with its content, if this process has made it."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_abandoned(directory: Path, pattern: str) -> None:
    """Remove the private directories of processes that were killed."""
    for path in directory.glob(pattern):
        if is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def is_abandoned(path: Path) -> bool:
    """Return whether this is a directory of this user that no running process has locked. Links do not count."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
