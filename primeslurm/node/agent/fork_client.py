"""Starts processes through fork servers (`fork_server`), which share their imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from primeslurm.node.agent.child_process import Child, ProcessGroup, open_log

# Timeout for a server's imports, even from a slow file system. Afterwards processes import by themselves.
IMPORT_S = 120.0
ANSWER_S = 10.0  # timeout for a fork
_MAX_ANSWER = 64


class ForkRequest(msgspec.Struct):
    """A process for the server to fork."""

    module: str
    args: Sequence[str]
    env: Mapping[str, str]
    directory: str
    passed: Sequence[str]  # variables of `env` whose values begin with a descriptor, in the order of the passed files


@contextlib.contextmanager
def memory_file(request: ForkRequest) -> Iterator[int]:
    """Yield the descriptor of a memory file with a request. An environment can exceed the size of a socket message."""
    descriptor = os.memfd_create("request")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            # The json module, not msgspec: it escapes parts of the environment that are not valid UTF-8.
            file.write(json.dumps(msgspec.to_builtins(request)).encode())
        yield descriptor
    finally:
        os.close(descriptor)


class ForkedChild(ProcessGroup):
    """A process forked by a server.

    `status` is the read end of a pipe that gets the wait status, and is closed if the server dies.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None
        os.set_blocking(status, False)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs. It is killed if its server dies."""
        if self._code is None:
            try:
                status = os.read(self._status, 4)
            except BlockingIOError:
                return None
            os.close(self._status)
            self._code = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else -signal.SIGKILL
        return self._code


class ForkServer:
    """A running fork server. It ends with this process, and its forked processes end with it.

    Raises:
        OSError: the interpreter or the log file cannot be opened.
    """

    def __init__(self, modules: Sequence[str], python: str, env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self._connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            argv = [python, "-m", "primeslurm.node.agent.fork_server", str(server_end.fileno()), *modules]
            try:
                self._process = Child(argv, env, log, cwd, (server_end.fileno(),))
            except OSError:
                self._connection.close()
                raise
        self.pid = self._process.pid
        self._connection.setblocking(False)
        self._began = time.monotonic()
        self._imported = False

    @property
    def imported(self) -> bool:
        if not self._imported:
            with contextlib.suppress(OSError):
                self._imported = bool(self._connection.recv(_MAX_ANSWER))
                self._connection.settimeout(ANSWER_S)
        return self._imported

    @property
    def failed(self) -> bool:
        late = not self._imported and time.monotonic() - self._began > IMPORT_S
        return late or self._process.poll() is not None

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path, passed: Mapping[str, int]
    ) -> ForkedChild:
        """Start a process with a command line of the form `PYTHON -m MODULE ARG ...`.

        It inherits the descriptors in `passed`. Their variables in `env` begin with the numbers.

        Raises:
            OSError: the server does not answer, or the log file cannot be opened.
        """
        request = ForkRequest(argv[2], argv[3:], env, str(cwd), list(passed))
        with open_log(log, argv) as handle:
            status, status_end = os.pipe()
            try:
                with memory_file(request) as message:
                    files = [message, handle.fileno(), status_end, *passed.values()]
                    socket.send_fds(self._connection, [b"."], files)
                pid = self._connection.recv(_MAX_ANSWER)
                if not pid:
                    raise BrokenPipeError(f"{log}: the fork server has ended")
            except OSError:
                os.close(status)
                self.close()  # a late answer would be taken for the answer to the next request
                raise
            finally:
                os.close(status_end)
        return ForkedChild(int(pid), status)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()


class ForkServers:
    """The fork servers of a node, by imported modules. A server starts when a process first needs it."""

    def __init__(self, log_dir: Path, cwd: Path) -> None:
        self._log_dir, self._cwd = log_dir, cwd
        self._servers: dict[tuple[str, ...], ForkServer | None] = {}

    def importing(self, modules: tuple[str, ...], python: str, env: Mapping[str, str]) -> bool:
        """Return whether processes must wait for a server that imports their modules.

        Starts the server if there is none. If it fails, the answer is False: processes then import by themselves.
        """
        if modules not in self._servers:
            self._servers[modules] = self._start(modules, python, env)
        server = self._servers[modules]
        if server is None:
            return False
        imported = server.imported
        if not server.failed:
            return not imported
        server.close()
        # A server that ended later is replaced. One that could not even import is not tried again.
        self._servers[modules] = self._start(modules, python, env) if imported else None
        return self._servers[modules] is not None

    def _start(self, modules: tuple[str, ...], python: str, env: Mapping[str, str]) -> ForkServer | None:
        try:
            return ForkServer(modules, python, env, self._log_dir / f"{modules[0]}.log", self._cwd)
        except OSError:
            return None  # the processes meet the same error, and report it

    def of(self, modules: tuple[str, ...]) -> ForkServer | None:
        return self._servers.get(modules)

    def close(self) -> None:
        for server in self._servers.values():
            if server is not None:
                server.close()
