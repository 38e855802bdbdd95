"""Start verifiers' tool servers so that a server that exits or reports an invalid port is noticed at once.

verifiers waits three minutes for a server's port and three more for its first answer, even if its process has exited.
Here the process is watched: if it exits, the wait ends with its exit code and its last output. The port file comes from
a sandbox, so only a few bytes of it are read. For a server on this host, the file is in the worker's own temporary
directory and not in /tmp, where verifiers has it, so that a killed worker leaves nothing.
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
MAX_BYTES = 16  # bytes that are read of a port or an exit code, more than either needs
LARGEST_PORT = 65535
_serve_in_runtime = launch.serve_in_runtime


def watch() -> None:
    """Let verifiers start all tool servers of this process through `serve_in_runtime`."""
    launch.serve_in_runtime = serve_in_runtime


async def serve_in_runtime(server: ServerBase, runtime: Runtime, **options: Any) -> int:
    """Start a server and return its port. Raise ToolsetError if it exits, reports no port, or does not answer."""
    watched = _WatchedRuntime(runtime)
    serving = asyncio.create_task(_serve_in_runtime(server, watched, **options))
    ended = asyncio.create_task(watched.ended())
    try:
        await asyncio.wait({serving, ended, watched.invalid_port}, return_when=asyncio.FIRST_COMPLETED)
        if watched.invalid_port.done():
            port = watched.invalid_port.result()
            raise ToolsetError(f"tool server {server.server_name!r} reports an invalid port: {port!r}")
        if serving.done():
            return int(serving.result())
        output = (await launch.log_tail(runtime, watched.log)).strip() or _no_output(server, ended.result())
        raise ToolsetError(f"tool server {server.server_name!r} ended with exit code {ended.result()}: {output}")
    finally:
        for task in (serving, ended):
            task.cancel()
        await asyncio.gather(serving, ended, return_exceptions=True)
        if watched.port_file is not None:
            watched.port_file.unlink(missing_ok=True)


class _WatchedRuntime:
    """A runtime whose background process records its exit code."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._started = asyncio.Event()
        # The beginning of what the server reports instead of a port
        self.invalid_port: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.port_file: Path | None = None
        self.log = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def run_background(self, argv: list[str], env: Mapping[str, str], log: str) -> None:
        self.log = log
        if hasattr(self._runtime, "_background"):
            if "MCP_PORT_FILE" in env:
                self.port_file = Path(tempfile.gettempdir(), Path(env["MCP_PORT_FILE"]).name)
                env = {**env, "MCP_PORT_FILE": str(self.port_file)}
        else:  # a local process is watched itself, so that it keeps its parent and dies with it
            argv = ["sh", "-c", f'{shlex.join(argv)}; echo $? > "$0"', f"{log}.exit"]
        await self._runtime.run_background(argv, env, log)
        self._started.set()

    async def read(self, path: str) -> bytes:
        content: bytes = await self._runtime._read(str(self.port_file or path), max_bytes=MAX_BYTES + 1)
        text = content.strip().decode(errors="replace")
        if text and not _is_port(text) and not self.invalid_port.done():
            self.invalid_port.set_result(text)
        return content

    async def ended(self) -> int:
        await self._started.wait()
        if processes := getattr(self._runtime, "_background", None):
            return int(await processes[-1].wait())
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(Exception):  # not written yet: each runtime raises its own error
                return int((await self._runtime.read(f"{self.log}.exit", MAX_BYTES)).decode())


def _no_output(server: ServerBase, code: int) -> str:
    kind = type(server)
    if code != 0:
        return "without any output"
    return (
        f"nothing serves; it is started by `python -m {kind.__module__}`, so that this module has to end with "
        f"`if __name__ == '__main__': {kind.__name__}.run()`"
    )


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_BYTES and 0 < int(text) <= LARGEST_PORT
