"""verifiers' subprocess runtime, each in a sandbox of its own, which is made when the first program needs it."""

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

from primeslurm.orchestrator.environments.sandbox import bwrap_args, uv_scripts, watch
from primeslurm.orchestrator.environments.sandbox.bwrap_sandbox import Sandbox, SandboxProcess
from primeslurm.orchestrator.environments.sandbox.limits import SandboxLimits
from primeslurm.orchestrator.environments.sandbox.port_forwarding import PrivateLoopback, SandboxGoneError

LONGEST_OUTPUT = 16 << 20
"""Bytes of each stream of a command that are kept; a program that never stops writing must not fill the worker."""
_PASSED = ("LANG", "LC_ALL", "TZ", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "UV_OFFLINE": "1"}
"""What would otherwise ask the internet first, and wait."""
_LINGER_S = 1.0


class SandboxedRuntime(PrivateLoopback, Runtime):  # type: ignore[misc]
    """Programs of the node in a sandbox. Made by verifiers, which gives it nothing but its own config."""

    limits: ClassVar[SandboxLimits] = SandboxLimits()
    visible: ClassVar[tuple[Path, ...]] = ()
    hidden: ClassVar[tuple[Path, ...]] = ()
    boxes: ClassVar[weakref.WeakSet[Sandbox]] = weakref.WeakSet()
    _watcher: ClassVar[asyncio.Task[None] | None] = None

    def __init__(self, config: SubprocessConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        self.info = SubprocessRuntimeInfo(**config.model_dump(), id=bwrap_args.WORKDIR)
        self.cwd = bwrap_args.WORKDIR
        self._box: Sandbox | None = None
        self._lock = asyncio.Lock()
        self._ports: set[int] = set()
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Nothing yet: many rollouts never run a program."""

    async def box(self) -> Sandbox:
        """Return the sandbox, made if there is none yet, in which all of the rollout's endpoints can be reached.

        Raises:
            SandboxError: it cannot be made.
        """
        async with self._lock:
            try:
                if self._box is None:
                    if self.stopped:
                        raise SandboxGoneError("the rollout is over")
                    made = Sandbox(self.limits, (*bwrap_args.python_paths(), *self.visible), self.hidden)
                    self._box = made
                    await made.start()
                    self._watch(made)
                for port in sorted(self._ports):
                    await self._box.forward(port)
            except (SandboxGoneError, OSError) as error:
                raise SandboxError(str(error)) from error
            return self._box

    def environment(self, env: dict[str, str]) -> dict[str, str]:
        """Make the environment of a program: nothing of the worker's but what names no secret."""
        own = {name: os.environ[name] for name in _PASSED if name in os.environ}
        path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
        base = {"PATH": path, "HOME": bwrap_args.HOME, "TMPDIR": "/tmp", "TERM": "dumb", "LANG": "C.UTF-8"}
        return {**base, **own, **_OFFLINE, **self.process_env(env)}

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a program to its end. Of each stream, the first `LONGEST_OUTPUT` bytes are kept."""
        with _Pipes("r", "w", "w") as pipes:
            os.close(pipes.take(0))
            process = await self._spawn(argv, env, pipes)
            return await self._result(process, pipes)

    async def _result(self, process: SandboxProcess, pipes: _Pipes, data: bytes | None = None) -> ProgramResult:
        kept = [asyncio.create_task(_keep(pipes.take(stream), LONGEST_OUTPUT)) for stream in (1, 2)]
        feeding = asyncio.create_task(_feed(pipes.take(0), data)) if data is not None else None
        try:
            await _begun()
            code = await process.wait()
            # What it started may hold the streams open: the command is over nevertheless.
            await asyncio.wait(kept, timeout=_LINGER_S)
        except SandboxGoneError as error:
            raise SandboxError(str(error)) from error
        except BaseException:
            self._ending = asyncio.create_task(process.signal(signal.SIGKILL))  # who cancels does not wait for it
            raise
        finally:
            for task in (*kept, *([feeding] if feeding is not None else [])):
                task.cancel()
            await asyncio.wait(kept)
        stdout, stderr = (b"" if task.cancelled() else task.result() for task in kept)
        return ProgramResult(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    async def _spawn(self, argv: list[str], env: dict[str, str], pipes: _Pipes) -> SandboxProcess:
        variables = self.environment(env)
        for text in (*argv, *variables, *variables.values()):
            os.fsencode(text)
            if "\0" in text:
                raise ValueError("embedded null byte")  # as Python says it of any program
        box = await self.box()
        try:
            process = await box.spawn(argv, variables, self.cwd, *pipes.inner)
        except SandboxGoneError as error:
            raise SandboxError(str(error)) from error
        except OSError as error:
            raise SandboxError(f"cannot start {argv[0]!r}: {error}") from error
        pipes.close_inner()
        return process

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        """Start a program whose streams stay open."""
        with _Pipes("r", "w", "w") as pipes:
            process = await self._spawn(argv, env, pipes)
            return await SandboxRuntimeProcess.around(process, pipes)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a program that runs as long as the sandbox."""
        words = ["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1 </dev/null', "background", log, *argv]
        with _Pipes("r", "w", "w") as pipes:
            await self._spawn(words, env, pipes)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        most = self.limits.disk if max_bytes is None else max_bytes
        with _Pipes("r", "w", "w") as pipes:
            process = await self._spawn(["head", "-c", str(most), "--", path], {}, pipes)
            kept = asyncio.create_task(_keep(pipes.take(1), most))
            why = asyncio.create_task(_keep(pipes.take(2), 4096))
            try:
                await _begun()
                code, data = await process.wait(), await kept
                said = (await why).decode(errors="replace").strip()
            except SandboxGoneError as error:
                raise SandboxError(str(error)) from error
            finally:
                kept.cancel()
                why.cancel()
        if code:
            raise SandboxError(f"read {path!r}: {said[-500:]}")
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the sandbox. Raises SandboxError."""
        target = shlex.quote(path)
        parent = shlex.quote(str(PurePosixPath(path).parent))
        with _Pipes("r", "w", "w") as pipes:
            words = ["sh", "-c", f"mkdir -p -- {parent} && cat > {target}"]
            process = await self._spawn(words, {}, pipes)
            result = await self._result(process, pipes, data)
        if result.exit_code:
            raise SandboxError(f"write {path!r}: {result.stderr.strip()[-500:]}")

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Put a script into the sandbox, to be run by a Python that set-up gave its packages. Raises SandboxError."""
        return await uv_scripts.put(self, script, activate)

    async def expose(self, port: int) -> str:
        """Open the way from the node to a port within."""
        return f"http://127.0.0.1:{await (await self.box()).expose(port)}"

    async def teardown(self) -> None:
        """End all of its programs."""
        async with self._lock:
            if self._box is not None:
                await self._box.stop()

    def cleanup(self) -> None:
        """End all of its programs where no event loop runs any more."""
        if self._box is not None:
            self._box.abandon()

    @classmethod
    def _watch(cls, box: Sandbox) -> None:
        """Look after a sandbox whose memory or processes no control group holds."""
        if box.group is not None and box.group.holds("memory") and box.group.holds("pids"):
            return
        SandboxedRuntime.boxes.add(box)
        if SandboxedRuntime._watcher is None or SandboxedRuntime._watcher.done():
            SandboxedRuntime._watcher = asyncio.create_task(watch.watching(SandboxedRuntime.boxes))


class SandboxRuntimeProcess(RuntimeProcess):  # type: ignore[misc]
    """A live program in a sandbox."""

    def __init__(self, process: SandboxProcess, stdin: asyncio.StreamWriter, stdout: Any, stderr: Any) -> None:
        self._process, self._stdin = process, stdin
        self.stdout, self.stderr = stdout, stderr

    @classmethod
    async def around(cls, process: SandboxProcess, pipes: _Pipes) -> SandboxRuntimeProcess:
        """Take the worker's ends of a program's streams."""
        return cls(process, await _writer(pipes.take(0)), _chunks(pipes.take(1)), _chunks(pipes.take(2)))

    async def write(self, data: bytes) -> None:
        """Write to what it reads."""
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait(self) -> int:
        """Wait for its exit code. Raises SandboxError."""
        try:
            return await self._process.wait()
        except SandboxGoneError as error:
            raise SandboxError(str(error)) from error
        finally:
            self._stdin.close()

    async def poll(self) -> int | None:
        """Return its exit code, if it has ended."""
        exited = self._process.exited
        if not exited.done():
            return None
        return exited.result() if exited.exception() is None else -signal.SIGKILL

    async def terminate(self) -> None:
        """Ask it to end."""
        await self._process.signal(signal.SIGTERM)

    async def kill(self) -> None:
        """End it."""
        await self._process.signal(signal.SIGKILL)


class _Pipes:
    """The streams of a program, as pipes: the ends that it gets (`inner`), and ours. "r": it reads, "w": it writes."""

    def __init__(self, *directions: str) -> None:
        pairs = [os.pipe() for _ in directions]
        self.inner = tuple(read if way == "r" else write for way, (read, write) in zip(directions, pairs, strict=True))
        self._outer = [write if way == "r" else read for way, (read, write) in zip(directions, pairs, strict=True)]
        self._inner_open = True

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close_inner()
        for fd in self._outer:
            if fd >= 0:
                os.close(fd)

    def take(self, stream: int) -> int:
        """Hand our end over to the caller, who closes it."""
        fd, self._outer[stream] = self._outer[stream], -1
        return fd

    def close_inner(self) -> None:
        """Close what the program has its own copies of."""
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


async def _keep(fd: int, most: int) -> bytes:
    """Read to the end, and keep the first `most` bytes. When cancelled, what came so far."""
    reader, transport = await _reader(fd)
    kept = bytearray()
    try:
        while chunk := await reader.read(1 << 16):
            kept += chunk[: most - len(kept)]
    except asyncio.CancelledError:
        pass
    finally:
        transport.close()
    return bytes(kept)


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
        writer.transport.abort()  # to close would be to wait until the rest is read
        raise
    writer.close()


async def _begun() -> None:
    """Let tasks that were just made begin. One that is cancelled before it began does not close what it was given."""
    await asyncio.sleep(0)
