"""Real servers for tests: forked vLLM engines, and the real vllm-router.

Importing vLLM takes seconds of CPU. A fork server imports it once, and forks an engine per request with the command
line and environment that it has on a real node (`plan.commands.command`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.support.ports import free_port
from benchmarks.support.servers import HOST, NODE_VALUES, Server, fill, start_process
from primeslurm.plan.commands.command import Command
from tests.support.forks import Forked, ForkServer

# Modules of engines. The first one runs.
VLLM = (
    "tests.support.vllm_server",
    "model_hosting_container_standards.sagemaker",
    "prometheus_fastapi_instrumentator",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_moe",
    "uvicorn.protocols.http.httptools_impl",
)


class EngineForks:
    """A fork server that has imported vLLM. Closing it ends all engines."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self._directory = directory
        self._server = ForkServer(VLLM, {**env, "PYTHONWARNINGS": "ignore"})
        self._engines: list[tuple[Server, Forked]] = []

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
        filled = {key: fill(value, values) for key, value in command.env.items()}
        env = os.environ | {key: value for key, value in filled.items() if value}
        args = [fill(part, values) for part in command.argv[3:]]  # after `python -m MODULE`
        path = self._directory / f"engine-{numbers['http']}-{len(self._engines)}.log"
        with path.open("wb") as log:
            forked = self._server.start(VLLM[0], *args, stdout=log, stderr=subprocess.STDOUT, env=env)
        server = Server(forked.pid, f"http://{HOST}:{numbers['http']}", path)
        self._engines.append((server, forked))
        return server

    def close(self) -> None:
        for server, _ in self._engines:
            server.stop()
        self._server.close()


def start_router(command: Command, engines: Mapping[str, str], log: Path) -> Server:
    """Start a router on `engines`, the address (host:port) of each engine by name."""
    return start_process(command, {f"addr:{name}:http": address for name, address in engines.items()}, log)
