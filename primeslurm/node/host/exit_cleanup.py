"""What an agent that is killed leaves on its node's disk is removed by a child that only waits for its end."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

# A shell, and not a process of Python: it waits beside every agent, in a few hundred KiB. It reads to the end of the
# pipe, which is the agent's end, however that came. What the agent ran is killed in the same moment, and may write a
# last time: the second look is for that.
_SCRIPT = """
trap '' HUP INT TERM USR1 USR2
while IFS= read -r path; do set -- "$@" "$path"; done
for path; do [ ! -e "$path" ] || left=1; done
[ -z "$left" ] || { rm -rf -- "$@"; sleep 1; rm -rf -- "$@"; }
"""
_CLOSE_S = 5.0
"""Longest wait for the shell's end; it goes on without anybody who waits."""


class ExitCleanup:
    """Removes directories once this process has ended, whether or not it could remove them itself.

    Raises:
        OSError: no shell could be started.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sweeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the shell."""
        return self._shell.pid

    def add(self, directory: Path) -> None:
        """Have a directory removed that this process has made for itself alone."""
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):  # somebody ended the shell: who comes next on this node looks again
            self._shell.stdin.write(f"{directory}\n".encode())
            self._shell.stdin.flush()

    def close(self) -> None:
        """Let it go: it removes what is left of the directories, and ends."""
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):
            self._shell.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(_CLOSE_S)
