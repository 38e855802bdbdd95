"""verifiers' subprocess runtime with a bubblewrap sandbox for each rollout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, Runtime, RuntimeProcess, SubprocessConfig, SubprocessRuntimeInfo

from primeslurm.orchestrator.environments.sandbox import bwrap_args, limit_watcher, uv_scripts
from primeslurm.orchestrator.environments.sandbox.bwrap_sandbox import Sandbox, SandboxProcess
from primeslurm.orchestrator.environments.sandbox.limits import SandboxLimits
from primeslurm.orchestrator.environments.sandbox.port_forwarding import PrivateLoopback, SandboxGoneError

# Most bytes of each output stream of a command that are kept. Endless output must not fill the worker's memory.
MAX_OUTPUT = 16 << 20
# Variables of the worker that programs get. None of them holds a secret.
_PASSED = ("LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
# Without these, libraries first try to reach the internet, and wait.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "UV_OFFLINE": "1"}
# Wait for the rest of a command's output after its exit. A background process may hold the streams open.
_OUTPUT_GRACE_S = 1.0


class SandboxedRuntime(PrivateLoopback, Runtime):  # type: ignore[misc]
    """Runs programs of the node in a sandbox, which starts with the first program.

    verifiers constructs it with its own config only, so limits and directories are attributes of a subclass.
    """

    limits: ClassVar[SandboxLimits] = SandboxLimits()
    visible: ClassVar[tuple[Path, ...]] = ()
    hidden: ClassVar[tuple[Path, ...]] = ()
    # Sandboxes whose memory or processes no control group limits
    watched: ClassVar[weakref.WeakSet[Sandbox]] = weakref.WeakSet()
    _watcher: ClassVar[asyncio.Task[None] | None] = None

    def __init__(self, config: SubprocessConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = SubprocessRuntimeInfo(**config.model_dump(), id=bwrap_args.WORKDIR)
        self.cwd = bwrap_args.WORKDIR
        self._sandbox: Sandbox | None = None
        self._lock = asyncio.Lock()
        self._ports: set[int] = set()
        self._kill_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Do nothing, because many rollouts never run a program."""

    async def sandbox(self) -> Sandbox:
        """Return the sandbox, with all of the rollout's endpoints reachable. Raises SandboxError if it cannot start."""
        async with self._lock:  # programs of a rollout may start at the same time
            try:
                if self._sandbox is None:
                    if self.stopped:
                        raise SandboxGoneError("the rollout is over")
                    self._sandbox = Sandbox(self.limits, (*bwrap_args.python_paths(), *self.visible), self.hidden)
                    await self._sandbox.start()
                    self._watch(self._sandbox)
                for port in sorted(self._ports):
                    await self._sandbox.forward(port)
            except (SandboxGoneError, OSError) as error:
                raise SandboxError(str(error)) from error
            return self._sandbox

    def environment(self, env: dict[str, str]) -> dict[str, str]:
        """Return the environment of a program. Of the worker's variables, it has only those that hold no secrets."""
        from_worker = {name: os.environ[name] for name in _PASSED if name in os.environ}
        path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
        base = {"PATH": path, "HOME": bwrap_args.HOME, "TMPDIR": "/tmp", "TERM": "dumb", "LANG": "C.UTF-8"}
        return {**base, **from_worker, **_OFFLINE, **self.process_env(env)}

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        with _Pipes() as pipes:
            os.close(pipes.take(0))  # the program reads an empty stdin
            process = await self._spawn(argv, env, pipes)
            code, stdout, stderr = await self._end_of(process, pipes)
        return ProgramResult(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    async def _end_of(
        self,
        process: SandboxProcess,
        pipes: _Pipes,
        data: bytes | None = None,
        most: int = MAX_OUTPUT,
        grace_s: float | None = _OUTPUT_GRACE_S,
    ) -> tuple[int, bytes, bytes]:
        """Feed a program `data`, and return its exit code and the first `most` bytes of each output stream.

        `grace_s`: wait for the rest of the output after the program's end; None: until the streams are closed.
        """
        outputs = [asyncio.create_task(_read_start(pipes.take(stream), most)) for stream in (1, 2)]
        feeding = asyncio.create_task(_feed(pipes.take(0), data)) if data is not None else None
        try:
            await _let_tasks_begin()
            code = await process.wait()
            await asyncio.wait(outputs, timeout=grace_s)
        except SandboxGoneError as error:
            raise SandboxError(str(error)) from error
        except BaseException:
            # Do not await the kill, so that cancelling is fast. The attribute keeps the task alive.
            self._kill_task = asyncio.create_task(process.signal(signal.SIGKILL))
            raise
        finally:
            for task in (*outputs, *([feeding] if feeding is not None else [])):
                task.cancel()
            await asyncio.wait(outputs)
        stdout, stderr = (b"" if task.cancelled() else task.result() for task in outputs)
        return code, stdout, stderr

    async def _spawn(self, argv: list[str], env: dict[str, str], pipes: _Pipes) -> SandboxProcess:
        variables = self.environment(env)
        for text in (*argv, *variables, *variables.values()):
            os.fsencode(text)
            if "\0" in text:
                raise ValueError("embedded null byte")  # as Python's subprocess does
        sandbox = await self.sandbox()
        try:
            process = await sandbox.spawn(argv, variables, self.cwd, *pipes.inner)
        except SandboxGoneError as error:
            raise SandboxError(str(error)) from error
        except OSError as error:
            raise SandboxError(f"cannot start {argv[0]!r}: {error}") from error
        pipes.close_inner()
        return process

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        with _Pipes() as pipes:
            process = await self._spawn(argv, env, pipes)
            stdin = await _writer(pipes.take(0))
            return SandboxRuntimeProcess(process, stdin, _chunks(pipes.take(1)), _chunks(pipes.take(2)))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        words = ["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1 </dev/null', "background", log, *argv]
        with _Pipes() as pipes:
            await self._spawn(words, env, pipes)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        limit = self.limits.disk if max_bytes is None else max_bytes
        with _Pipes() as pipes:
            # `head` runs inside, so links cannot lead to files of the node.
            process = await self._spawn(["head", "-c", str(limit), "--", path], {}, pipes)
            code, data, stderr = await self._end_of(process, pipes, most=limit, grace_s=None)
        if code:
            raise SandboxError(f"read {path!r}: {stderr.decode(errors='replace').strip()[-500:]}")
        return data

    async def write(self, path: str, data: bytes) -> None:
        target = shlex.quote(path)
        parent = shlex.quote(str(PurePosixPath(path).parent))
        with _Pipes() as pipes:
            words = ["sh", "-c", f"mkdir -p -- {parent} && cat > {target}"]
            process = await self._spawn(words, {}, pipes)
            code, _, stderr = await self._end_of(process, pipes, data)
        if code:
            raise SandboxError(f"write {path!r}: {stderr.decode(errors='replace').strip()[-500:]}")

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        return await uv_scripts.upload(self, script, activate)

    async def expose(self, port: int) -> str:
        return f"http://127.0.0.1:{await (await self.sandbox()).expose(port)}"

    async def teardown(self) -> None:
        async with self._lock:
            if self._sandbox is not None:
                await self._sandbox.stop()

    def cleanup(self) -> None:  # verifiers calls this after the event loop has ended
        if self._sandbox is not None:
            self._sandbox.abandon()

    @classmethod
    def _watch(cls, sandbox: Sandbox) -> None:
        # Control groups hold these limits exactly, so such a sandbox needs no watcher.
        if sandbox.group is not None and sandbox.group.holds("memory") and sandbox.group.holds("pids"):
            return
        # Attributes of the base class, because each worker needs only one watcher.
        SandboxedRuntime.watched.add(sandbox)
        if SandboxedRuntime._watcher is None or SandboxedRuntime._watcher.done():
            SandboxedRuntime._watcher = asyncio.create_task(limit_watcher.watch(SandboxedRuntime.watched))


class SandboxRuntimeProcess(RuntimeProcess):  # type: ignore[misc]
    """A running program in a sandbox, as verifiers sees it."""

    def __init__(self, process: SandboxProcess, stdin: asyncio.StreamWriter, stdout: Any, stderr: Any) -> None:
        self._process, self._stdin = process, stdin
        self.stdout, self.stderr = stdout, stderr

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait(self) -> int:
        try:
            return await self._process.wait()
        except SandboxGoneError as error:
            raise SandboxError(str(error)) from error
        finally:
            self._stdin.close()

    async def poll(self) -> int | None:
        exited = self._process.exited
        if not exited.done():
            return None
        return exited.result() if exited.exception() is None else -signal.SIGKILL

    async def terminate(self) -> None:
        await self._process.signal(signal.SIGTERM)

    async def kill(self) -> None:
        await self._process.signal(signal.SIGKILL)


class _Pipes:
    """Pipes for stdin, stdout and stderr of a program. `inner` are the program's ends."""

    def __init__(self) -> None:
        (read, feed), *outputs = [os.pipe() for _ in range(3)]
        self.inner = (read, *(write for _, write in outputs))
        self._outer = [feed, *(read for read, _ in outputs)]
        self._inner_open = True

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close_inner()
        for fd in self._outer:
            if fd >= 0:
                os.close(fd)

    def take(self, stream: int) -> int:
        """Hand over the worker's end of a stream. The caller must close it."""
        fd, self._outer[stream] = self._outer[stream], -1
        return fd

    def close_inner(self) -> None:
        """Close the program's ends. The program has its own copies."""
        if self._inner_open:
            self._inner_open = False
            for fd in self.inner:
                os.close(fd)


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport


async def _read_start(fd: int, limit: int) -> bytes:
    """Read to the end and return the first `limit` bytes. If cancelled, return the bytes so far."""
    reader, transport = await _reader(fd)
    start = bytearray()
    try:
        while chunk := await reader.read(1 << 16):
            start += chunk[: limit - len(start)]
    except asyncio.CancelledError:
        pass
    finally:
        transport.close()
    return bytes(start)


async def _chunks(fd: int) -> AsyncIterator[bytes]:
    reader, transport = await _reader(fd)
    try:
        while chunk := await reader.read(1 << 16):
            yield chunk
    finally:
        transport.close()


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0))
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _feed(fd: int, data: bytes) -> None:
    writer = await _writer(fd)
    try:
        with contextlib.suppress(OSError):
            writer.write(data)
            await writer.drain()
    except asyncio.CancelledError:
        writer.transport.abort()  # close() would wait until the program has read the rest
        raise
    writer.close()


async def _let_tasks_begin() -> None:
    # A task that is cancelled before it has begun never closes the file descriptor it was given.
    await asyncio.sleep(0)
