"""One operating-system process and everything it starts, in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from primeslurm.orphans import end_with_parent


def _before_exec() -> None:
    # A killed agent must not leave servers behind; Slurm would find them, the local executor would not.
    end_with_parent()
    # Before a time limit Slurm sends USR2 to every process of the step, not only to its task: it is for the agent.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Slurm hands on the shell's soft limit, often 1,024: as many strangers' connections would leave a server no file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Child:
    """A started process. Its standard output and error go to one log file, appended to over restarts.

    Args:
        argv: its command.
        env: all of its environment.
        log: file for what it prints.
        cwd: its directory.
        pass_fds: open files that it gets under the same numbers.

    Raises:
        OSError: the program or the log file cannot be opened.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as handle:
            handle.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(argv)}\n".encode())
            self._popen = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=_before_exec,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code once it ended (negative: by that signal). What it left in its group lives on."""
        return self._popen.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def go_on(self) -> None:
        """Continue all of the group that were stopped by a signal."""
        self._signal_group(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to the whole group."""
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)
