"""Directories of this user's alone in places where everybody may write, such as /tmp.

Nobody can have made one beforehand: its name ends in a random word, and it is made, never taken as it is found. While
its owner lives it is locked, which tells those who clear up after killed ones to leave it, systemd-tmpfiles included.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path

from primeslurm.base.files import LONGEST_SOCKET

WORD = 6
"""Letters of the random word: paths of sockets are short."""
LONGEST_FOR_SOCKETS = LONGEST_SOCKET - len("/01234567-89ab-cdef-0123-456789abcdef")
"""Bytes of a directory's path: that of a Unix socket has 107, and vLLM names its sockets by such words."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


class UnsafeDirectoryError(OSError):
    """Other users could put something else in a directory's place."""


def random_word() -> str:
    """Return what makes a name impossible to know beforehand."""
    return "".join(secrets.choice(_LETTERS) for _ in range(WORD))


class PrivateDirectory:
    """A directory that this process makes, locks and removes.

    Args:
        path: where; what is to be new has a `random_word` in its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def make(self) -> None:
        """Make it, empty and closed to others; its parents, too, where they are missing.

        Raises:
            UnsafeDirectoryError: others may rename what is in its parent.
            OSError: it cannot be made, or is there already.
        """
        parent = self.path.parent
        parent.mkdir(parents=True, exist_ok=True)
        if swappable(parent):
            mode = f"{stat.S_IMODE(parent.stat().st_mode):04o}"
            why = f"may be written by everybody and is not sticky (mode {mode}): others could replace what is in it"
            raise UnsafeDirectoryError(f"{parent} {why}; chmod +t {parent}, or another directory")
        if os.path.lexists(self.path):
            raise FileExistsError(f"{self.path} is there already")
        # Locked before it has its name: whoever clears up finds it locked, or not at all.
        hidden = parent / f".{self.path.name}"
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it, if it was made here."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def swappable(directory: Path) -> bool:
    """Whether anybody may rename or remove what this user makes in a directory. Raises OSError."""
    mode = directory.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def is_abandoned(path: Path) -> bool:
    """Whether this is a directory that a process of this user has made and not removed, and that runs no more.

    A link, or what another user has put there, is not.
    """
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
