"""Real servers for tests: vLLM engines forked from a zygote, and the real vllm-router.

Importing vLLM takes seconds of CPU. The zygote imports it once and then forks a server per request, with the command
line and environment that `plan.commands.command` gives for a real node.
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
    """A process that has imported vLLM and forks engines. Close it to end all of them."""

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
        """Fork an engine; `ports` pins port numbers, others are probed. It is not waited for.

        `elsewhere`: placeholders of other processes, for example `addr:store-master:rpc`.
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
        """End every engine that was started, then the zygote."""
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
    """Start the router of `router_command`; `engines` = name of each engine to its host:port."""
    return start_process(command, {f"addr:{name}:http": address for name, address in engines.items()}, log)
