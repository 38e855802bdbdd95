"""A fake of Prime Intellect's sandbox service: it answers the real client over HTTP, and runs commands with bubblewrap.

It shows which requests are made, in which order and with which key. It does not show that the provider answers like
this, or how the provider enforces limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.server import ConnectASGIApplication, Endpoint
from prime_sandboxes._connectrpc import GOOGLE_PROTOBUF_BINARY_CODEC
from prime_sandboxes.rpc_command_session import COMMAND_SESSION_START_RPC_METHOD
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

API = "/api/v1/sandbox"
ID, TOKEN = "box-1", "of-the-gateway"
NOW = "2026-01-01T00:00:00Z"
SEEN = ("/usr", "/etc")
"""Directories of this machine that a sandbox sees."""


class PrimeService:
    """The provider, with one sandbox. `key` is the account's key."""

    def __init__(self, directory: Path, key: str) -> None:
        self._key, self._files = key, directory
        (directory / "tmp").mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (directory / name).symlink_to(f"usr/{name}")
        self.created: list[dict[str, Any]] = []
        self.policies: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.commands: list[str] = []
        self.url = ""

    def app(self) -> Starlette:
        """Return the HTTP interface of the account and of the gateway to the sandbox."""
        return Starlette(
            routes=[
                Route(API, self._create, methods=["POST"]),
                Route(f"{API}/status:batchGet", self._statuses, methods=["POST"]),
                Route(f"{API}/{ID}/egress-policy", self._policy, methods=["PUT"]),
                Route(f"{API}/{ID}", self._delete, methods=["DELETE"]),
                Route("/gate/us/job/upload", self._upload, methods=["POST"]),
                Route("/gate/us/job/read-file", self._read),
                Mount("/gate/us/job", _Commands(self)),
            ]
        )

    def _refused(self, request: Request, token: str) -> bool:
        return request.headers.get("authorization") != f"Bearer {token}"

    async def _create(self, request: Request) -> Response:
        if self._refused(request, self._key):
            return JSONResponse({"detail": "who are you?"}, 401)
        order = await request.json()
        self.created.append(order)
        gate = {"gateway_url": f"{self.url}/gate", "user_ns": "us", "job_id": "job", "token": TOKEN}
        return JSONResponse(
            {
                "id": ID,
                "name": order["name"],
                "dockerImage": order["docker_image"],
                "cpuCores": order["cpu_cores"],
                "memoryGB": order["memory_gb"],
                "diskSizeGB": order["disk_size_gb"],
                "diskMountPath": "/",
                "gpuCount": order["gpu_count"],
                "status": "PENDING",
                "timeoutMinutes": order["timeout_minutes"],
                "createdAt": NOW,
                "updatedAt": NOW,
                "gatewayAuth": {**gate, "expires_at": "2999-01-01T00:00:00Z"},
            }
        )

    async def _statuses(self, request: Request) -> Response:
        ids = (await request.json())["sandbox_ids"]
        return JSONResponse({"statuses": [{"sandbox_id": each, "status": "RUNNING"} for each in ids], "errors": []})

    async def _policy(self, request: Request) -> Response:
        self.policies.append(await request.json())
        return JSONResponse({"policy": {}, "generation": 1, "applied_generation": 1, "applied": True})

    async def _delete(self, request: Request) -> Response:
        self.deleted.append(ID)
        return JSONResponse({})

    async def _upload(self, request: Request) -> Response:
        if self._refused(request, TOKEN):
            return JSONResponse({}, 401)
        async with request.form() as form:
            data = await form["file"].read()  # type: ignore[union-attr]
        path = self._path(request.query_params["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return JSONResponse({"success": True, "path": str(path), "size": len(data), "timestamp": NOW})

    async def _read(self, request: Request) -> Response:
        path = self._path(request.query_params["path"])
        text = path.read_text() if path.is_file() else ""
        return JSONResponse({"content": text, "size": len(text)})

    def _path(self, inside: str) -> Path:
        return self._files / inside.lstrip("/")

    async def run(self, command: Any) -> AsyncIterator[dict[str, Any]]:
        """Run a command in the sandbox, and return its result."""
        self.commands.append(command.args[-1])
        words = ["bwrap", "--bind", str(self._files), "/", "--dev", "/dev", "--proc", "/proc"]
        words += [word for path in SEEN for word in ("--ro-bind", path, path)]
        words += ["--chdir", command.cwd or "/"]
        done = await asyncio.create_subprocess_exec(
            *words, command.cmd, *command.args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(command.envs)
        )
        stdout, stderr = await done.communicate()
        yield {"start": {"pid": done.pid}}
        for name, data in (("stdout", stdout), ("stderr", stderr)):
            if data:
                yield {"data": {name: data}}
        yield {"end": {"exit_code": done.returncode, "exited": True}}


class _Commands(ConnectASGIApplication[PrimeService]):
    """Serves commands by Connect RPC, with the client's own messages."""

    def __init__(self, service: PrimeService) -> None:
        async def start(request: Any, _context: object) -> AsyncIterator[Any]:
            async for event in service.run(request.command):
                yield COMMAND_SESSION_START_RPC_METHOD.output(event=event)

        method = COMMAND_SESSION_START_RPC_METHOD
        path = f"/{method.service_name}/{method.name}"
        super().__init__(
            service=service,
            endpoints=lambda _: {path: Endpoint.server_stream(method, start)},
            codecs=[GOOGLE_PROTOBUF_BINARY_CODEC],
        )

    @property
    def path(self) -> str:
        return f"/{COMMAND_SESSION_START_RPC_METHOD.service_name}"


@contextlib.contextmanager
def serving(service: PrimeService) -> Iterator[PrimeService]:
    """Serve at a free port of 127.0.0.1."""
    listener = socket.create_server(("127.0.0.1", 0))
    service.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(service.app(), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
