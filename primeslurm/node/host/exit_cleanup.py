"""Removes directories of an agent on the local disk after the agent has ended, even if it was killed."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

# The child reads paths until the pipe closes, which happens when the agent ends in any way. It is a shell and not a
# Python process, because it waits beside every agent and needs only a few hundred KiB. Processes of the agent are
# killed in the same moment and may still write, so it removes everything a second time.
_SCRIPT = """
trap '' HUP INT TERM USR1 USR2
while IFS= read -r path; do set -- "$@" "$path"; done
for path; do [ ! -e "$path" ] || left=1; done
[ -z "$left" ] || { rm -rf -- "$@"; sleep 1; rm -rf -- "$@"; }
"""
# Longest wait for the shell to end. It finishes by itself afterwards.
_CLOSE_S = 5.0


class ExitCleanup:
    """Removes directories when this process ends. Raises OSError if no shell can be started."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "exit-cleanup"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
        self.pid = self._shell.pid

    def add(self, directory: Path) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed the shell; the next agent on this node cleans up
            self._shell.stdin.write(f"{directory}\n".encode())
            self._shell.stdin.flush()

    def close(self) -> None:
        """Let the shell remove the remaining directories, and end."""
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):
            self._shell.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(_CLOSE_S)
