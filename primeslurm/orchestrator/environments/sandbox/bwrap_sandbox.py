"""One bubblewrap sandbox, and the socket to the program inside that starts others (`sandbox_init`)."""

from __future__ import annotations

import array
import asyncio
import contextlib
import inspect
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from primeslurm.orchestrator.environments.sandbox import limits, sandbox_init
from primeslurm.orchestrator.environments.sandbox.bwrap_args import FILES, bwrap_args
from primeslurm.orchestrator.environments.sandbox.limits import ControlGroup, SandboxLimits
from primeslurm.orchestrator.environments.sandbox.port_forwarding import PortForwarder, SandboxGoneError
from primeslurm.wire.decoding import Count, DamagedError, decode_json

_START_TIMEOUT_S = 60
_ANSWER_TIMEOUT_S = 30
# A shell script: it enters the control groups and then becomes bubblewrap, which so never runs outside them.
_JOIN_GROUPS = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1"; shift; n=$((n - 1)); done; exec "$@"'


class SandboxReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The sandbox accepts requests."""


class ProgramExited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="exited"):
    """A program of the sandbox has ended."""

    pid: Count
    # Exit code, or minus the number of the signal that ended the program
    code: Annotated[int, msgspec.Meta(ge=-255, le=255)]


class RequestAnswered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answered"):
    """A request was carried out or failed. A requested socket is attached to this message."""

    id: Count  # Number of the request
    pid: Count | None = None  # Process that a spawn request started, as numbered in the sandbox
    error: str = ""  # Why the request failed; empty on success


SandboxAnswer = SandboxReady | ProgramExited | RequestAnswered


class SandboxProcess:
    """A program in a sandbox."""

    def __init__(self, sandbox: Sandbox, pid: int) -> None:
        self.pid = pid
        self._sandbox = sandbox
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.exited)

    async def signal(self, number: int) -> None:
        if not self.exited.done():
            with contextlib.suppress(SandboxGoneError):
                await self._sandbox.request("signal", pid=self.pid, signal=number)


class _Reply(NamedTuple):
    answer: RequestAnswered
    fds: list[int]  # Descriptors that came with the answer
    process: SandboxProcess | None  # The program that a spawn request started


class Sandbox:
    """A sandbox. Answers from inside may be forged, so only numbers, short texts and sockets are accepted.

    Args:
        allowed: what all its programs together may use.
        hidden: directories that programs must not see, wherever they are.
    """

    def __init__(self, allowed: SandboxLimits, visible: Sequence[Path], hidden: Sequence[Path]) -> None:
        self.allowed, self._visible, self._hidden = allowed, visible, hidden
        self._name = uuid.uuid4().hex[:12]
        self.group: ControlGroup | None = None
        self.first_pid = 0  # The sandbox's first process, as numbered on the node. All others end with it.
        self.end_reason = ""
        self._bwrap: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._pending: dict[int, asyncio.Future[_Reply]] = {}
        self._processes: dict[int, SandboxProcess] = {}
        self._ready: asyncio.Future[None] | None = None
        self._requests = 0
        self._forwarder = PortForwarder(self._make_socket)

    async def start(self) -> None:
        """Start bubblewrap. Raises SandboxGoneError if it fails or the program inside does not answer."""
        if shutil.which("bwrap") is None:
            raise SandboxGoneError(limits.bubblewrap_problem())
        self.group = limits.make_group(self._name)
        if self.group is not None:
            self.group.limit(self.allowed)
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        # SOCK_SEQPACKET keeps the boundaries of messages, so a forged length cannot confuse the worker.
        worker_end, sandbox_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        info, info_write = os.pipe()
        files = {path: _memory_file(text.encode()) for path, text in FILES.items()}
        program = [sys.executable, "-I", "-S", "-c", inspect.getsource(sandbox_init), str(sandbox_end.fileno())]
        program.append(json.dumps(self.allowed.rlimits(self.group)))
        procs_files = self.group.procs_files if self.group is not None else []
        bwrap = bwrap_args(self._visible, self._hidden, files, self.allowed.disk, self.allowed.open_network)
        bwrap += ["--info-fd", str(info_write), "--", *program]
        try:
            self._bwrap = await asyncio.create_subprocess_exec(
                *("sh", "-c", _JOIN_GROUPS, "join", str(len(procs_files)), *procs_files, *bwrap),
                # Programs can read the environment of the sandbox's first process, so it must hold no secret.
                env={"PATH": os.environ.get("PATH", os.defpath)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(sandbox_end.fileno(), info_write, *files.values()),
                start_new_session=True,  # Ctrl-C in a terminal must not reach it before the worker can clean up
            )
        finally:
            sandbox_end.close()
            _close([info_write, *files.values()])
        self._control = worker_end
        worker_end.setblocking(False)
        loop.add_reader(worker_end, self._read)
        try:
            self.first_pid = await asyncio.to_thread(_read_first_pid, info)
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._ready
        except BaseException as error:
            why = await self._read_stderr()
            await self.stop()
            if isinstance(error, SandboxGoneError | TimeoutError):
                raise SandboxGoneError(f"cannot start a sandbox: {why or 'it did not answer'}") from None
            raise

    async def _read_stderr(self) -> str:
        assert self._bwrap is not None and self._bwrap.stderr is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return (await self._bwrap.stderr.read(4096)).decode(errors="replace").strip()
        return ""

    def _read(self) -> None:
        """Read messages from inside. Anything that is not a valid answer ends the sandbox."""
        assert self._control is not None
        for _ in range(64):  # then back to the event loop: a sandbox that floods the socket must not starve the others
            try:
                data, fds, _, _ = socket.recv_fds(self._control, sandbox_init.MAX_MESSAGE, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._fail_all("it has ended")
                return
            try:
                answer: SandboxAnswer = decode_json(data, SandboxAnswer)  # type: ignore[arg-type]  # a union is no type
                self._take(answer, fds)
            except (DamagedError, KeyError):  # KeyError: no request has this number
                _close(fds)
                self.kill("it sent an invalid answer")

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
                pending, process = self._pending.pop(id), None
                if pid is not None and not error:
                    # Register the process now: the next packet may already report that it has ended.
                    process = self._processes[pid] = SandboxProcess(self, pid)
                if pending.done():
                    _close(fds)
                else:
                    pending.set_result(_Reply(message, fds, process))

    def _fail_all(self, why: str) -> None:
        self.end_reason = self.end_reason or why
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        waiting: list[asyncio.Future[Any]] = [*self._pending.values(), *(p.exited for p in self._processes.values())]
        waiting += [self._ready] if self._ready is not None else []
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxGoneError(f"the sandbox is gone: {self.end_reason}"))
                future.exception()  # mark it as retrieved, because maybe nobody awaits it
        self._pending.clear()
        self._processes.clear()

    async def request(self, do: str, fds: Sequence[int] = (), **numbers: int) -> _Reply:
        """Send a request to `sandbox_init` and wait for the answer. Raises SandboxGoneError."""
        if self._control is None:
            raise SandboxGoneError(f"the sandbox is gone: {self.end_reason or 'it was never started'}")
        self._requests += 1
        number = self._requests
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        packet = json.dumps({"do": do, "id": number, **numbers}).encode()
        while True:
            try:
                # As socket.send_fds does it, but on a non-blocking socket.
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                self._control.sendmsg([packet], rights)
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
                if self._control is None:
                    break
            except OSError:
                self._fail_all("it has ended")
                break
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await future
        except TimeoutError:  # programs in the sandbox have stopped or starved sandbox_init
            self.kill("it did not answer")
            raise SandboxGoneError(f"the sandbox is gone: {self.end_reason}") from None

    async def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> SandboxProcess:
        """Start a program.

        Raise SandboxGoneError if the sandbox has ended, and OSError if the program does not exist, or the limit of
        processes is reached.
        """
        # A file, because argv and env may be larger than a packet.
        spec = _memory_file(json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd}).encode())
        try:
            answer, fds, process = await self.request("spawn", (spec, stdin, stdout, stderr))
        finally:
            os.close(spec)
        _close(fds)
        if process is None:
            raise OSError(answer.error[:500] or "the sandbox did not name the process that it started")
        return process

    async def forward(self, port: int) -> None:
        """Make a port of the node's loopback reachable inside, under the same number. Raises SandboxGoneError."""
        if not self.allowed.open_network:
            await self._forwarder.forward(port)

    async def expose(self, port: int) -> int:
        """Make a port inside reachable for this user on the node. Return the port on the node's loopback."""
        return port if self.allowed.open_network else await self._forwarder.expose(port)

    async def _make_socket(self, port: int | None) -> socket.socket:
        answer, fds, _ = await (self.request("socket") if port is None else self.request("listen", port=port))
        if answer.error or len(fds) != 1:
            _close(fds)
            raise SandboxGoneError(f"the sandbox sent no socket: {answer.error[:200]}")
        received = socket.socket(fileno=fds[0])
        # A forged descriptor could be anything, for example a socket that blocks or belongs to another network.
        if received.type != socket.SOCK_STREAM or received.family != socket.AF_INET:
            received.close()
            raise SandboxGoneError("the sandbox sent a socket of another kind than requested")
        received.setblocking(False)
        return received

    def kill(self, why: str) -> None:
        self.end_reason = self.end_reason or why
        if self._bwrap is not None and self._bwrap.returncode is None:
            # --die-with-parent: the first process inside dies with bubblewrap, and the kernel kills its PID namespace.
            with contextlib.suppress(ProcessLookupError):
                self._bwrap.kill()

    async def stop(self) -> None:
        self._forwarder.close()
        self.kill("it was stopped")
        if self._bwrap is not None:
            await self._bwrap.wait()
        if self._control is not None:
            self._fail_all("it was stopped")
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)

    def abandon(self) -> None:  # for when the event loop has ended
        self.kill("the worker ended")
        if self.group is not None:
            self.group.remove(1.0)


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("primeslurm")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read_first_pid(info: int) -> int:
    with os.fdopen(info) as file:
        try:
            return int(json.loads(file.read())["child-pid"])
        except (ValueError, KeyError):
            raise SandboxGoneError("bubblewrap did not start") from None


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
