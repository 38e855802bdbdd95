"""Tool servers that end before they listen, or say a port that is none: found at once.

verifiers waits for three minutes for a server's port, and three more for its first answer, whether its process is still
there or not. Here the process is watched meanwhile: when it ends, so does the wait, with its exit code and last words.
What it writes down comes from a sandbox: of that file no more is read than a port takes. Of a server of this host it is
among the worker's own temporary files, and not in /tmp, where verifiers has it: who is killed leaves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch
from verifiers.v1.mcp.server import ServerBase
from verifiers.v1.runtimes import Runtime

POLL_S = 0.5
LONGEST = 16
"""Bytes of a port or an exit code, with room to spare."""
LARGEST_PORT = 65535
_serve_in_runtime = launch.serve_in_runtime


def watch() -> None:
    """Have verifiers start all tool servers of this process in this way."""
    launch.serve_in_runtime = serve_in_runtime


async def serve_in_runtime(server: ServerBase, runtime: Runtime, **options: Any) -> int:
    """Start a server and return its port.

    Raises:
        ToolsetError: it has ended, says what is no port, or does not answer in time.
    """
    watched = _WatchedRuntime(runtime)
    serving = asyncio.create_task(_serve_in_runtime(server, watched, **options))
    ended = asyncio.create_task(watched.ended())
    refused = asyncio.create_task(watched.refused())
    try:
        await asyncio.wait({serving, ended, refused}, return_when=asyncio.FIRST_COMPLETED)
        if refused.done():
            raise ToolsetError(f"tool server {server.server_name!r} says that its port is {refused.result()!r}")
        if serving.done():
            return int(serving.result())
        words = (await launch.log_tail(runtime, watched.log)).strip() or _without_words(server, ended.result())
        raise ToolsetError(f"tool server {server.server_name!r} ended with exit code {ended.result()}: {words}")
    finally:
        for task in (serving, ended, refused):
            task.cancel()
        await asyncio.gather(serving, ended, refused, return_exceptions=True)
        watched.forget_port()


class _WatchedRuntime:
    """A runtime whose background process writes its exit code when it ends."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._started = asyncio.Event()
        self._said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._port_file: Path | None = None
        self.log = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def run_background(self, argv: list[str], env: Mapping[str, str], log: str) -> None:
        """Start it, as the runtime does."""
        self.log = log
        if hasattr(self._runtime, "_background") and "MCP_PORT_FILE" in env:
            self._port_file = Path(tempfile.gettempdir(), Path(env["MCP_PORT_FILE"]).name)
            env = {**env, "MCP_PORT_FILE": str(self._port_file)}
        await self._runtime.run_background(self._noted(argv), env, log)
        self._started.set()

    async def read(self, path: str) -> bytes:
        """Read where the server writes its port."""
        found: bytes = await self._runtime._read(str(self._port_file or path), max_bytes=LONGEST + 1)
        text = found.strip().decode(errors="replace")
        if text and not _is_port(text) and not self._said.done():
            self._said.set_result(text)
        return found

    def forget_port(self) -> None:
        """Remove what is of no more use, and lies on this host where no sandbox goes with the rollout."""
        if self._port_file is not None:
            self._port_file.unlink(missing_ok=True)

    async def refused(self) -> str:
        """Wait until the server says that its port is what cannot be one; returns that, or the beginning of it."""
        return await self._said

    async def ended(self) -> int:
        """Wait until it has ended; returns its exit code."""
        await self._started.wait()
        if (own := self._process()) is not None:
            return int(await own.wait())
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(Exception):  # not written yet: runtimes say that each in its own way
                return int((await self._runtime.read(f"{self.log}.exit", LONGEST)).decode())

    def _process(self) -> asyncio.subprocess.Process | None:
        """The process itself, where it is one of this host: nothing stands between it and its parent's death."""
        processes = getattr(self._runtime, "_background", None)
        return processes[-1] if processes else None

    def _noted(self, argv: list[str]) -> list[str]:
        if hasattr(self._runtime, "_background"):
            return argv
        return ["sh", "-c", f'{shlex.join(argv)}; echo $? > "$0"', f"{self.log}.exit"]


def _without_words(server: ServerBase, code: int) -> str:
    kind = type(server)
    if code != 0:
        return "without a word"
    return (
        f"nothing serves; it is started by `python -m {kind.__module__}`, so that this module has to end with "
        f"`if __name__ == '__main__': {kind.__name__}.run()`"
    )


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= LONGEST and 0 < int(text) <= LARGEST_PORT
