"""Processes of a node that are forked from one that has imported what they need (`fork_server`)."""

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

IMPORT_S = 120.0
"""For a server to import its modules, from however slow a file system. After it, processes do that themselves."""
ANSWER_S = 10.0
"""For a server to fork."""
_ANSWER = 64
"""Bytes of an answer, at most."""


class ForkRequest(msgspec.Struct):
    """What a server is to fork."""

    module: str
    args: Sequence[str]
    env: Mapping[str, str]
    directory: str
    handed: Sequence[str]
    """Variables of `env` whose values begin with the number of an open file: in the order of these files."""


@contextlib.contextmanager
def memory_file(request: ForkRequest) -> Iterator[int]:
    """Write a request to a file in memory: an environment may be larger than a message of a socket.

    Yields:
        The file's descriptor, closed with the block.
    """
    descriptor = os.memfd_create("request")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            # Unlike msgspec, json escapes what is not UTF-8 in the environment.
            file.write(json.dumps(msgspec.to_builtins(request)).encode())
        yield descriptor
    finally:
        os.close(descriptor)


class ForkedChild(ProcessGroup):
    """A process that a `ForkServer` has forked.

    Args:
        pid: its process id.
        status: the end of a pipe that gets its wait status, and that is closed if the server dies.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None
        os.set_blocking(status, False)

    def poll(self) -> int | None:
        """Return the exit code once it ended. It is killed if its server is."""
        if self._code is None:
            try:
                told = os.read(self._status, 4)
            except BlockingIOError:
                return None
            os.close(self._status)
            self._code = os.waitstatus_to_exitcode(int.from_bytes(told, "little")) if told else -signal.SIGKILL
        return self._code


class ForkServer:
    """A process that imports modules and forks others. It ends with this one, and what it has forked with it.

    Args:
        modules: that it imports.
        python: its interpreter.
        env: its environment.
        log: file for what importing prints.
        cwd: its directory.

    Raises:
        OSError: the interpreter or the log file cannot be opened.
    """

    def __init__(self, modules: Sequence[str], python: str, env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [python, "-m", "primeslurm.node.agent.fork_server", str(theirs.fileno()), *modules]
            try:
                self._process = Child(argv, env, log, cwd, (theirs.fileno(),))
            except OSError:
                self._connection.close()
                raise
        self._connection.setblocking(False)
        self._began = time.monotonic()
        self._imported = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def imported(self) -> bool:
        """Whether it has imported its modules."""
        if not self._imported:
            with contextlib.suppress(OSError):
                self._imported = bool(self._connection.recv(_ANSWER))
                self._connection.settimeout(ANSWER_S)
        return self._imported

    @property
    def failed(self) -> bool:
        """Whether it has ended, or imports for too long."""
        late = not self._imported and time.monotonic() - self._began > IMPORT_S
        return late or self._process.poll() is not None

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path, handed: Mapping[str, int]
    ) -> ForkedChild:
        """Start a process.

        Args:
            argv: its command, `PYTHON -m MODULE ARG ...`.
            env: all of its environment.
            log: file for what it prints.
            cwd: its directory.
            handed: open files that it gets, by the variable of `env` whose value begins with their number.

        Raises:
            OSError: the server does not answer, or the log file cannot be opened.
        """
        request = ForkRequest(argv[2], argv[3:], env, str(cwd), list(handed))
        with open_log(log, argv) as handle:
            status, told = os.pipe()
            try:
                with memory_file(request) as message:
                    files = [message, handle.fileno(), told, *handed.values()]
                    socket.send_fds(self._connection, [b"."], files)
                pid = self._connection.recv(_ANSWER)
                if not pid:
                    raise BrokenPipeError(f"{log}: the process that it is forked from has ended")
            except OSError:
                os.close(status)
                self.close()  # an answer that comes late would be taken for the next one's
                raise
            finally:
                os.close(told)
        return ForkedChild(int(pid), status)

    def close(self) -> None:
        """End it, and all that it has forked."""
        self._connection.close()
        self._process.kill()


class ForkServers:
    """The fork servers of a node, by what they import. Each is started when a process asks for it first.

    Args:
        directory: for their logs.
        cwd: their directory.
    """

    def __init__(self, directory: Path, cwd: Path) -> None:
        self._directory, self._cwd = directory, cwd
        self._servers: dict[tuple[str, ...], ForkServer | None] = {}

    def importing(self, modules: tuple[str, ...], python: str, env: Mapping[str, str]) -> bool:
        """Tell whether processes with these modules wait while they are imported; where that fails, they need not.

        Args:
            modules: that they need.
            python: their interpreter.
            env: of the process that asks.
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
        # One that had imported all is followed by another; where that fails, processes do it themselves.
        self._servers[modules] = self._start(modules, python, env) if imported else None
        return self._servers[modules] is not None

    def _start(self, modules: tuple[str, ...], python: str, env: Mapping[str, str]) -> ForkServer | None:
        try:
            return ForkServer(modules, python, env, self._directory / f"{modules[0]}.log", self._cwd)
        except OSError:
            return None  # it will be said of the processes

    def of(self, modules: tuple[str, ...]) -> ForkServer | None:
        """Return the one that has imported these modules. None: there is none, or it could not."""
        return self._servers.get(modules)

    def close(self) -> None:
        """End all, and all that they have forked."""
        for server in self._servers.values():
            if server is not None:
                server.close()
