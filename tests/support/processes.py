"""Real servers for tests: vLLM engines forked from a zygote, and the real vllm-router.

Importing vLLM takes CPU seconds. The zygote imports it once, and forks a server per request with the command line and
environment of a real node (`plan.commands.command`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.ports import free_port
from benchmarks.support.servers import HOST, NODE_VALUES, Server, fill, start_process
from primeslurm.plan.commands.command import Command

ZYGOTE = Path(__file__).with_name("zygote.py")


class Zygote:
    """A process that has imported vLLM and forks engines. Closing it ends all of them."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self._directory = directory
        self._log = directory / "zygote.log"
        self._servers: list[Server] = []
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(ZYGOTE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self._read()

    def start(
        self, command: Command, ports: Mapping[str, int] | None = None, elsewhere: Mapping[str, str] | None = None
    ) -> Server:
        """Fork an engine without waiting for it. `ports` pins port numbers, `elsewhere` gives placeholders of other
        processes.
        """
        numbers = {name: free_port() for name in command.ports} | dict(ports or {})
        values = NODE_VALUES | {"host": HOST, "tmp": str(self._directory)} | dict(elsewhere or {})
        values |= {f"port:{name}": str(number) for name, number in numbers.items()}
        for name, text in command.files.items():
            (self._directory / name).write_text(fill(text, values))
        env = {key: fill(value, values) for key, value in command.env.items()}
        log = self._directory / f"engine-{numbers['http']}-{len(self._servers)}.log"
        request = {
            "argv": [fill(part, values) for part in command.argv[3:]],  # python -m module
            "env": {key: value for key, value in env.items() if value},
            "log": str(log),
            "measured": "COVERAGE_PROCESS_START" in os.environ,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        server = Server(self._read()["pid"], f"http://{HOST}:{numbers['http']}", log)
        self._servers.append(server)
        return server

    def close(self) -> None:
        """End all engines, then the zygote."""
        for server in self._servers:
            server.stop()
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the zygote died:\n{self._log.read_text()[-3000:]}")


def start_router(command: Command, engines: Mapping[str, str], log: Path) -> Server:
    """Start a router on `engines`, the address (host:port) of each engine by name."""
    return start_process(command, {f"addr:{name}:http": address for name, address in engines.items()}, log)
