"""One operating-system process and everything it starts, in a process group of its own."""

from __future__ import annotations

import abc
import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from primeslurm.base import files
from primeslurm.base.parent_death import end_with_parent


def settle(*, ignore_term: bool = False) -> None:
    """Set up this process, which a child is about to become: it ends with the agent, and has limits of its own.

    Args:
        ignore_term: ignore SIGTERM. Slurm may send it to every process of a step before it ends the job, and the agent
            still wants a checkpoint from the trainer then.
    """
    # A killed agent must not leave servers behind; Slurm would find them, the local executor would not.
    end_with_parent()
    # Before a time limit Slurm sends USR2 to every process of the step, not only to its task: it is for the agent.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Slurm hands on the shell's soft limit, often 1,024: as many strangers' connections would leave a server no file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class ProcessGroup(abc.ABC):
    """A started process that leads a session of its own."""

    pid: int
    """Process id, which is also the id of its process group."""

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Return the exit code once it ended (negative: by that signal). What it left in its group lives on."""

    def send(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

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
            os.killpg(self.pid, number)


def open_log(log: Path, argv: Sequence[str]) -> BinaryIO:
    """Open the log file of a process that is about to be started, and say what is started. Raises OSError."""
    header = f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(argv)}\n".encode()

    def opened() -> BinaryIO:
        log.parent.mkdir(parents=True, exist_ok=True)
        handle = log.open("ab", buffering=0)
        try:
            handle.write(header)
        except OSError:
            handle.close()
            raise
        return handle

    return files.retrying(log, opened)


class Child(ProcessGroup):
    """A process of a program. Its standard output and error go to one log file, appended to over restarts.

    Args:
        argv: its command.
        env: all of its environment.
        log: file for what it prints.
        cwd: its directory.
        pass_fds: open files that it gets under the same numbers.
        ignore_term: it ignores SIGTERM, unless it installs a handler. `terminate` then kills it.

    Raises:
        OSError: the program or the log file cannot be opened.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        pass_fds: Sequence[int] = (),
        *,
        ignore_term: bool = False,
    ) -> None:
        self._ignores_term = ignore_term
        with open_log(log, argv) as handle:
            self._popen = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=partial(settle, ignore_term=ignore_term),
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code once it ended."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the whole group, and SIGKILL to a process that ignores SIGTERM."""
        super().terminate()
        if self._ignores_term:
            self.send(signal.SIGKILL)
