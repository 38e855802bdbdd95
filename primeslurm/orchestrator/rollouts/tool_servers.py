"""Tool servers that end before they listen, found at once.

verifiers waits for three minutes for a server's port, and three more for its first answer, whether its process is still
there or not. Here the process is watched meanwhile: when it ends, so does the wait, with its exit code and last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping
from typing import Any

from verifiers.v1.errors import ToolsetError
from verifiers.v1.mcp import launch
from verifiers.v1.mcp.server import ServerBase
from verifiers.v1.runtimes import Runtime

POLL_S = 0.5
_serve_in_runtime = launch.serve_in_runtime


def watch() -> None:
    """Have verifiers start all tool servers of this process in this way."""
    launch.serve_in_runtime = serve_in_runtime


async def serve_in_runtime(server: ServerBase, runtime: Runtime, **options: Any) -> int:
    """Start a server and return its port.

    Raises:
        ToolsetError: it has ended, or does not answer in time.
    """
    watched = _WatchedRuntime(runtime)
    serving = asyncio.create_task(_serve_in_runtime(server, watched, **options))
    ended = asyncio.create_task(watched.ended())
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return int(serving.result())
        words = (await launch.log_tail(runtime, watched.log)).strip() or "without a word"
        raise ToolsetError(f"tool server {server.server_name!r} ended with exit code {ended.result()}: {words}")
    finally:
        for task in (serving, ended):
            task.cancel()
        await asyncio.gather(serving, ended, return_exceptions=True)


class _WatchedRuntime:
    """A runtime whose background process writes its exit code when it ends."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._started = asyncio.Event()
        self.log = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def run_background(self, argv: list[str], env: Mapping[str, str], log: str) -> None:
        """Start it, as the runtime does."""
        self.log = log
        await self._runtime.run_background(self._noted(argv), env, log)
        self._started.set()

    async def ended(self) -> int:
        """Wait until it has ended; returns its exit code."""
        await self._started.wait()
        if (own := self._process()) is not None:
            return int(await own.wait())
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(Exception):  # not written yet: runtimes say that each in its own way
                return int((await self._runtime.read(f"{self.log}.exit")).decode())

    def _process(self) -> asyncio.subprocess.Process | None:
        """The process itself, where it is one of this host: nothing stands between it and its parent's death."""
        processes = getattr(self._runtime, "_background", None)
        return processes[-1] if processes else None

    def _noted(self, argv: list[str]) -> list[str]:
        if hasattr(self._runtime, "_background"):
            return argv
        return ["sh", "-c", f'{shlex.join(argv)}; echo $? > "$0"', f"{self.log}.exit"]
