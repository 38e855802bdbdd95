"""An operating-system process with all its descendants, as a process group of its own."""

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


def prepare_child(*, ignore_term: bool = False) -> None:
    """Set up this process, which is about to become a child of the agent: lifetime, signals and limits.

    With `ignore_term` it ignores SIGTERM.
    """
    # A killed agent must not leave servers behind. Slurm would end them, the local executor would not.
    end_with_parent()
    # Before a time limit Slurm sends USR2 to every process of the step. Only the agent may react to it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Slurm passes on the shell's soft limit of open files, often 1,024: too few for a server's connections.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


class ProcessGroup(abc.ABC):
    """A started process that leads its own session. `pid` is also the id of its process group."""

    pid: int

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. Its descendants may outlive it."""

    def send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

    def terminate(self) -> None:
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def open_log(log: Path, argv: Sequence[str]) -> BinaryIO:
    """Open the log file of a process for appending, and write its command as a header. Raises OSError."""
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
    """A process started from a command line. Its output is appended to one log file.

    With `ignore_term` it ignores SIGTERM unless it installs a handler, and `terminate` kills it. Slurm may send SIGTERM
    to all processes of a step before the job ends, when the trainer still has to write a checkpoint.

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
                preexec_fn=partial(prepare_child, ignore_term=ignore_term),
            )
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the group, and SIGKILL to a process that ignores SIGTERM."""
        super().terminate()
        if self._ignores_term:
            self.send(signal.SIGKILL)
