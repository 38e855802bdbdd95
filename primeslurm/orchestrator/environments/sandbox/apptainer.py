"""What apptainer does not do by itself: a network of an instance's own, and telling whether limits can be held.

Instances that their user may enter need no rights for a network with nothing but a loopback. The worker carries the
connections to the endpoints of the rollout.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, RuntimeProcess
from verifiers.v1.runtimes.container import cli

from primeslurm.orchestrator.environments.sandbox import namespaces
from primeslurm.orchestrator.environments.sandbox.port_forwarding import (
    PortForwarder,
    PrivateLoopback,
    SandboxGoneError,
)

log = logging.getLogger(__name__)

PRIVATE_NETWORK = {"APPTAINER_NET": "1", "APPTAINER_NETWORK": "none", "APPTAINER_USERNS": "1"}
"""Environment variables: apptainer gives an instance a network of its own, which its user may enter, also if it is
installed setuid."""


class PrivateNetwork(PrivateLoopback):
    """Of an instance that has one: what its class does beside other things."""

    _instance: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._crossing = PortForwarder(self._socket)
        self._ports: set[int] = set()
        self._lock = asyncio.Lock()

    async def expose(self, port: int) -> str:
        """Open the way from the node to a port within."""
        return f"http://127.0.0.1:{await self._crossing.expose(port)}"

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a program to its end."""
        await self._open()
        result: ProgramResult = await super().run(argv, env)  # type: ignore[misc]
        return result

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        """Start a program whose streams stay open."""
        await self._open()
        process: RuntimeProcess = await super().open_process(argv, env)  # type: ignore[misc]
        return process

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a program that runs as long as the instance."""
        await self._open()
        await super().run_background(argv, env, log)  # type: ignore[misc]

    async def teardown(self) -> None:
        """End the instance, and all connections of it."""
        self._crossing.close()
        await super().teardown()  # type: ignore[misc]

    async def _open(self) -> None:
        async with self._lock:
            try:
                for port in sorted(self._ports):
                    await self._crossing.forward(port)
            except SandboxGoneError as error:
                raise SandboxError(str(error)) from error

    async def _socket(self, port: int | None) -> socket.socket:
        listed = await cli("apptainer", "instance", "list", self._instance)
        rows = [line.split() for line in listed.stdout.splitlines()]
        pids = [row[1] for row in rows if row[:1] == [self._instance] and row[1].isdigit()]
        if not pids:
            raise SandboxGoneError(f"apptainer does not list the instance: {listed.stderr.strip()[-300:]}")
        return await namespaces.socket_within(int(pids[0]), port)


class LimitProbe:
    """Whether apptainer may limit cores and memory here.

    It has systemd do that, in a session of the user that few jobs have. Without one, no instance starts with limits.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._why: str | None = None

    async def why_not(self, image: str) -> str:
        """Say why it may not; empty if it may. It is tried once.

        Args:
            image: path of any SIF.
        """
        async with self._lock:
            if self._why is None:
                tried = await cli("apptainer", "exec", "--containall", "--memory", "1g", image, "true")
                said = [line for line in tried.stderr.splitlines() if "cgroup" in line]
                self._why = said[-1].rpartition("FATAL:")[2].strip() if tried.exit_code and said else ""
                if self._why:
                    log.warning(
                        "apptainer holds no limits here: what tasks say of cores and memory is not held. %s", self._why
                    )
        return self._why
