"""One sandbox: a bubblewrap process, and the socket to the program within that starts others."""

from __future__ import annotations

import array
import asyncio
import contextlib
import functools
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from primeslurm.orchestrator.environments.sandbox import bwrap_args, limits, sandbox_init
from primeslurm.orchestrator.environments.sandbox.limits import ControlGroup, SandboxLimits
from primeslurm.orchestrator.environments.sandbox.port_forwarding import PortForwarder, SandboxGoneError
from primeslurm.orchestrator.environments.sandbox.protocol import (
    ProgramExited,
    RequestAnswered,
    SandboxAnswer,
    SandboxReady,
)
from primeslurm.wire.decoding import DamagedError, decode_json

_START_S = 60
_JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1"; shift; n=$((n - 1)); done; exec "$@"'
"""A shell enters control groups and becomes bubblewrap, which so never runs outside of them."""
_ANSWER_S = 30
_LONGEST_ANSWER = 4096


class SandboxProcess:
    """A program in a sandbox."""

    def __init__(self, box: Sandbox, pid: int) -> None:
        self.pid = pid
        self._box = box
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Wait for its exit code. Raises SandboxGoneError."""
        return await asyncio.shield(self.exited)

    async def signal(self, number: int) -> None:
        """Send a signal to it and what it started, unless it has ended."""
        if not self.exited.done():
            with contextlib.suppress(SandboxGoneError):
                await self._box.request("signal", pid=self.pid, signal=number)


class _Reply(NamedTuple):
    """An answer with what came with it."""

    answer: RequestAnswered
    fds: list[int]
    process: SandboxProcess | None
    """What was started, if that was asked for."""


class Sandbox:
    """A sandbox. What answers from within may be hostile: answers are only ever numbers, words and sockets.

    Args:
        allowed: what all its programs may use together.
        visible: directories of the node that they may read.
        hidden: directories that they must not see, wherever they lie.
    """

    def __init__(self, allowed: SandboxLimits, visible: Sequence[Path], hidden: Sequence[Path]) -> None:
        self.allowed, self._visible, self._hidden = allowed, visible, hidden
        self._name = uuid.uuid4().hex[:12]
        self.group: ControlGroup | None = None
        self.first_pid = 0
        """The sandbox's first process as the node numbers it; when it ends, all end."""
        self.ended_for = ""
        self._bwrap: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._answers: dict[int, asyncio.Future[_Reply]] = {}
        self._processes: dict[int, SandboxProcess] = {}
        self._ready: asyncio.Future[None] | None = None
        self._requests = 0
        self._crossing = PortForwarder(self._socket)

    async def start(self) -> None:
        """Make the sandbox.

        Raises:
            SandboxGoneError: bubblewrap could not, or what it started did not answer.
        """
        if shutil.which("bwrap") is None:
            raise SandboxGoneError(limits.bubblewrap_works())
        self.group = limits.make_group(self._name)
        if self.group is not None:
            self.group.limit(self.allowed)
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        info, info_write = os.pipe()
        files = {path: _file(text.encode()) for path, text in bwrap_args.FILES.items()}
        program = [
            *(sys.executable, "-I", "-S", "-c", _source(), str(theirs.fileno())),
            json.dumps(self.allowed.for_processes(self.group)),
        ]
        doors = self.group.doors if self.group is not None else []
        wrapped = bwrap_args.bubblewrap(
            self._visible, self._hidden, files, self.allowed.disk, self.allowed.open_network
        )
        wrapped += ["--info-fd", str(info_write), "--", *program]
        given = (theirs.fileno(), info_write, *files.values())
        try:
            self._bwrap = await asyncio.create_subprocess_exec(
                *("sh", "-c", _JOIN, "join", str(len(doors)), *doors, *wrapped),
                env={"PATH": os.environ.get("PATH", os.defpath)},  # the first process in the sandbox shows its own
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=given,
                start_new_session=True,
            )
        finally:
            theirs.close()
            for fd in (info_write, *files.values()):
                os.close(fd)
        self._control = ours
        ours.setblocking(False)
        loop.add_reader(ours, self._read)
        try:
            self.first_pid = await asyncio.to_thread(_first_pid, info)
            async with asyncio.timeout(_START_S):
                await self._ready
        except BaseException as error:
            why = await self._stderr()
            await self.stop()
            if isinstance(error, SandboxGoneError | TimeoutError):
                raise SandboxGoneError(f"no sandbox could be made: {why or 'it did not answer'}") from None
            raise

    async def _stderr(self) -> str:
        assert self._bwrap is not None and self._bwrap.stderr is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return (await self._bwrap.stderr.read(4096)).decode(errors="replace").strip()
        return ""

    def _read(self) -> None:
        """Take what came from within. Anything that is no answer ends the sandbox."""
        assert self._control is not None
        for _ in range(64):  # and back to the loop: the others' turn, too
            try:
                data, fds, _, _ = socket.recv_fds(self._control, _LONGEST_ANSWER, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._lost("it has ended")
                return
            try:
                answer: SandboxAnswer = decode_json(data, SandboxAnswer)  # type: ignore[arg-type]  # a union is no type
                self._take(answer, fds)
            except (DamagedError, KeyError):  # the latter: nothing was asked under that number
                _close(fds)
                self.kill("it sent what is no answer")

    def _take(self, message: SandboxAnswer, fds: list[int]) -> None:
        match message:
            case ProgramExited(pid, code):
                process = self._processes.pop(pid, None)
                if process is not None and not process.exited.done():
                    process.exited.set_result(code)
                _close(fds)
            case SandboxReady():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
                _close(fds)
            case RequestAnswered(id, pid, error):
                waiting, process = self._answers.pop(id), None
                if pid is not None and not error:  # kept before its end may be heard of
                    process = self._processes[pid] = SandboxProcess(self, pid)
                if waiting.done():
                    _close(fds)
                else:
                    waiting.set_result(_Reply(message, fds, process))

    def _lost(self, why: str) -> None:
        self.ended_for = self.ended_for or why
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *(p.exited for p in self._processes.values())]
        waiting += [self._ready] if self._ready is not None else []
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxGoneError(f"the sandbox is gone: {self.ended_for}"))
                future.exception()  # nobody may be waiting
        self._answers.clear()
        self._processes.clear()

    async def request(self, do: str, fds: Sequence[int] = (), **numbers: int) -> _Reply:
        """Ask the program within to do something, in the words of `inside`. Raises SandboxGoneError."""
        if self._control is None:
            raise SandboxGoneError(f"the sandbox is gone: {self.ended_for or 'it never was'}")
        self._requests += 1
        number, loop = self._requests, asyncio.get_running_loop()
        future: asyncio.Future[_Reply] = loop.create_future()
        self._answers[number] = future
        packet = json.dumps({"do": do, "id": number, **numbers}).encode()
        while True:
            try:
                # one packet, as `socket.send_fds` has it; that cannot be told not to block alone
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                self._control.sendmsg([packet], rights)
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
                if self._control is None:
                    break
            except OSError:
                self._lost("it has ended")
                break
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await future
        except TimeoutError:  # its programs have stopped or starved the one that answers
            self.kill("it did not answer")
            raise SandboxGoneError(f"the sandbox is gone: {self.ended_for}") from None

    async def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> SandboxProcess:
        """Start a program.

        Raises:
            SandboxGoneError: the sandbox is gone.
            OSError: there is no such program, or no more processes are allowed.
        """
        spec = _file(json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd}).encode())
        try:
            answer, fds, process = await self.request("spawn", (spec, stdin, stdout, stderr))
        finally:
            os.close(spec)
        _close(fds)
        if process is None:
            raise OSError(answer.error[:500] or "the sandbox did not say what it started")
        return process

    async def forward(self, port: int) -> None:
        """Let programs within reach a port of the node's loopback, under the same number. Raises SandboxGoneError."""
        if not self.allowed.open_network:
            await self._crossing.forward(port)

    async def expose(self, port: int) -> int:
        """Let this user's processes of the node reach a port within. Returns the port on the node's loopback."""
        return port if self.allowed.open_network else await self._crossing.expose(port)

    async def _socket(self, port: int | None) -> socket.socket:
        answer, fds, _ = await (self.request("socket") if port is None else self.request("listen", port=port))
        if answer.error or len(fds) != 1:
            _close(fds)
            raise SandboxGoneError(f"the sandbox gave no socket: {answer.error[:200]}")
        found = socket.socket(fileno=fds[0])
        if found.type != socket.SOCK_STREAM or found.family != socket.AF_INET:
            found.close()
            raise SandboxGoneError("the sandbox gave another socket than it was asked for")
        found.setblocking(False)
        return found

    def kill(self, why: str) -> None:
        """End every process in it, at once."""
        self.ended_for = self.ended_for or why
        if self._bwrap is not None and self._bwrap.returncode is None:  # its first process dies with it, and all others
            with contextlib.suppress(ProcessLookupError):
                self._bwrap.kill()

    async def stop(self) -> None:
        """End it, and remove what it left."""
        self._crossing.close()
        self.kill("it was stopped")
        if self._bwrap is not None:
            await self._bwrap.wait()
        if self._control is not None:
            self._lost("it was stopped")
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)

    def abandon(self) -> None:
        """End it where no event loop runs any more."""
        self.kill("the worker ended")
        if self.group is not None:
            self.group.remove(1.0)


def _file(data: bytes) -> int:
    """A file in memory, to be read by who gets its descriptor."""
    fd = os.memfd_create("primeslurm")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _first_pid(info: int) -> int:
    with os.fdopen(info) as file:
        try:
            return int(json.loads(file.read())["child-pid"])
        except (ValueError, KeyError):
            raise SandboxGoneError("bubblewrap did not start") from None


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@functools.cache
def _source() -> str:
    assert sandbox_init.__file__ is not None
    return Path(sandbox_init.__file__).read_text()
