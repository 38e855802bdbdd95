"""Processes that are forked from one with all their imports, which would take seconds of CPU each.

Otherwise they equal separately started processes. Tests of whole runs cover the normal start.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.support.unmeasured import measuring

ROOT = Path(__file__).resolve().parents[2]
ORCHESTRATOR = (
    "primeslurm.orchestrator.evaluation.evaluation_orchestrator",
    "primeslurm.orchestrator.pipeline.orchestrator",
    "primeslurm.orchestrator.worker.main",
    "primeslurm.orchestrator.environments.reverse_text",
    "tensorboard.summary",
    "verifiers.v1.tasksets",
    "primeslurm.orchestrator.worker.preload",
)
"""Modules of the orchestrator and of environment workers."""
TRAINER = (
    "primeslurm.trainer.main",
    "primeslurm.models.qwen3.model",
    "torchtitan.trainer",
    "tests.trainer.gradients",
    "tests.trainer.ranks",
)
"""Modules of trainer ranks."""
_MEASURING = measuring()
"""Read at import: the first user of a server may be an unmeasured test, but the server also serves measured ones."""


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: int, stdout: IO[str] | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._status, self._reading = status, threading.Lock()
        weakref.finalize(self, os.close, status)

    def poll(self) -> int | None:
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def communicate(self) -> tuple[str, None]:
        """Read its output to the end, and wait."""
        printed = self.stdout.read() if self.stdout else ""
        self.wait()
        return printed, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end at this moment, because it is not our child
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._reading:  # one thread may wait while another one polls
                if self.returncode is None:
                    status = os.read(self._status, 4)
                    assert len(status) == 4, "the fork server has died"
                    self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        return self.returncode

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.wait()


class ForkServer:
    """A process that has imported modules, and forks others. It ends with this process."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        extra = {**_MEASURING, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1", **variables}
        argv = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *modules]
        with theirs:
            self._process = subprocess.Popen(argv, cwd=ROOT, env=os.environ | extra, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def start(
        self,
        module: str,
        *args: str | Path,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Forked:
        """Fork `python -m MODULE ARGS` without stdin. `stdout` may be subprocess.PIPE, `stderr` subprocess.STDOUT."""
        status, status_pipe = os.pipe()
        read = write = None
        if stdout == subprocess.PIPE:
            read, write = os.pipe()
        out = write if write is not None else stdout if isinstance(stdout, int) else stdout.fileno()
        err = out if stderr == subprocess.STDOUT else stderr if isinstance(stderr, int) else stderr.fileno()
        request = {
            "module": module,
            "args": [str(each) for each in args],
            "env": dict(os.environ if env is None else env),
            "directory": str(cwd or Path.cwd()),
        }
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [nothing, out, err, status_pipe])
        finally:
            for each in (nothing, status_pipe, write):
                if each is not None:
                    os.close(each)
        pid = self._connection.recv(64)
        assert pid, "the fork server has died"
        return Forked(int(pid), status, None if read is None else os.fdopen(read))

    def close(self) -> None:
        """End the server, which then writes its coverage."""
        self._connection.close()
        self._process.wait(60)


@functools.cache
def server(modules: tuple[str, ...], **variables: str) -> ForkServer:
    """Return the server of these modules. The first call starts it."""
    return ForkServer(modules, variables)
