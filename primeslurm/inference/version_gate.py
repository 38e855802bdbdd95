"""ASGI middleware that lets an engine serve only while the orchestrator has confirmed its policy version.

Use it with `vllm serve --middleware primeslurm.inference.version_gate.VersionGate`. It derives the version from the
control requests that pass through it, so it always agrees with the engine about the weights that were applied.

    closed        no version was confirmed since the process started, an update failed, or a request needs a newer
                  version: /health and generation return 503, so that routers avoid the engine
    open          a version is confirmed; during an update generation is paused, and requests wait
    unresponsive  the engine core does not answer (`liveness_gate`): as closed, but status and /health return 504
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import uuid
from pathlib import Path

import psutil

from primeslurm.inference.auth import App, Message, Receive, Scope, Send, answer
from primeslurm.inference.liveness_gate import HEALTH_PATH, LivenessGate, generates
from primeslurm.wire import cache_salt
from primeslurm.wire.names import ENGINE_HEADER, STATUS_PATH
from primeslurm.wire.weight_transfer import filesystem
from primeslurm.wire.weight_transfer.messages import EngineStatus

SHUTDOWN_PATH = "/primeslurm/shutdown"
SHUTDOWN_EXIT_CODE = 70

_VERSION_FIELDS = {"/finish_weight_update": "weight_version", "/update_weight_version": "new_version"}
_UPDATE_STEPS = ("/start_weight_update", "/update_weights", "/finish_weight_update")
_VERSION = re.compile("[0-9]{1,9}")
# Longest control request that is parsed for a version [bytes]. Real ones have fewer than 100.
LARGEST_CONTROL = 1 << 20
_SALT_KEY = b'"cache_salt"'
_SALT = re.compile(_SALT_KEY + rb'\s*:\s*"[^"\\]*:([0-9]{1,9})"')
_SALT_END = re.compile(r":([0-9]{1,9})\Z")
_WATCHED = {*_UPDATE_STEPS, *_VERSION_FIELDS, "/init_weight_transfer_engine", "/pause", "/resume"}


class GateState:
    """The policy version of an engine, and whether it may generate, derived from the control requests that it got."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.version: int | None = None
        self.asked_for = -1  # Newest version that a request needed since the orchestrator last confirmed one
        self.updating = False
        self.updates = 0  # Number of weight updates begun. With 0 the engine has the weights that it loaded at start.
        self.initialized = False
        self.paused = False

    @property
    def closed(self) -> str:
        """Why the gate is closed; empty if it is open."""
        if self.version is None:
            return "stale: no policy version is confirmed on this engine"
        if self.version < self.asked_for:
            return f"stale: a request needs policy version {self.asked_for}, and this engine has version {self.version}"
        return ""

    def observe(self, path: str, body: bytes, ok: bool) -> None:
        if path in _UPDATE_STEPS:
            self._observe_update(path, ok)
        if ok and path in _VERSION_FIELDS:
            self.version = _version(body, _VERSION_FIELDS[path])
            # The orchestrator may return to an older policy. Requests that need a newer one close the gate again.
            self.asked_for = -1
        if ok and path == "/init_weight_transfer_engine":
            self.initialized = True
        if ok and path in ("/pause", "/resume"):
            self.paused = path == "/pause"

    def _observe_update(self, path: str, ok: bool) -> None:
        if path == "/start_weight_update":
            self.updates += 1
        self.updating = ok and path != "/finish_weight_update"
        if not ok:
            self.version = None

    def report(self) -> EngineStatus:
        """Return the response to GET /primeslurm/status. During an update the version is None."""
        version = None if self.updating else self.version
        return EngineStatus(version, self.incarnation, self.paused, self.updates, self.initialized)


class VersionGate(LivenessGate):
    """The middleware: answers status requests, refuses generation while closed, and observes control requests."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._state = GateState()

    def refusal(self, salt: str = "") -> str:
        if version := _SALT_END.search(salt):
            self._state.asked_for = max(self._state.asked_for, int(version[1]))
        return super().refusal(salt) or self._state.closed

    async def serve_live(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path == STATUS_PATH:
            await answer(send, 200, self._state.report())
        elif path == SHUTDOWN_PATH and scope["method"] == "POST":
            await answer(send, 200, {"exit_code": SHUTDOWN_EXIT_CODE})
            asyncio.get_running_loop().call_later(0.1, _exit_at_once)  # after the response has been sent
        elif (path == HEALTH_PATH or generates(path)) and self._state.closed:
            await answer(send, 503, {"error": self._state.closed})
        elif path == "/update_weights" and scope["method"] == "POST":
            await self._update(scope, receive, send)
        elif path in _WATCHED and scope["method"] == "POST":
            await self._watch(path, scope, receive, send)
        elif generates(path) and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a generation request unless it needs a newer policy. Name this engine in a header of the response."""
        # The orchestrator may be unable to reach an engine that workers can reach. Such an engine learns from a request
        # that it has missed an update, because the cache salt ends with the version at which the group was opened.
        body = await read_body(receive)
        if body is None:
            return
        body = cache_salt.reveal(body)
        self._state.asked_for = max(self._state.asked_for, _asked_for(body))
        if self._state.closed:
            await answer(send, 503, {"error": self._state.closed})
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and scope.get("server"):
                host, port = scope["server"]
                named = (ENGINE_HEADER.lower().encode(), f"{host}:{port}".encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        await self._app(scope, _again(body, receive), sending)

    async def _update(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to update weights. Read an adapter first, while the engine still generates."""
        if (body := await read_body(receive)) is None:
            return
        if (directory := _adapter(body)) is not None:
            # An engine generates nothing while its workers read. If reading fails here, it fails there, too.
            with contextlib.suppress(OSError, ValueError):
                await asyncio.to_thread(filesystem.read_ahead, directory)
        await self._watch("/update_weights", scope, _again(body, receive), send)

    async def _watch(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def receiving() -> Message:
            message = await receive()
            body.extend(message.get("body", b"")[: LARGEST_CONTROL + 1 - len(body)])
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Update the state before the response is sent, because the client may act on it at once.
                self._state.observe(path, bytes(body), ok=message["status"] == 200)
            await send(message)

        self._controlled += 1
        try:
            await self._app(scope, receiving, sending)
        except BaseException:
            self._state.observe(path, bytes(body), ok=False)
            raise
        finally:
            self._controlled -= 1


async def read_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if its client disconnects."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives a request whose body has already been received."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return messages.pop() if messages else await receive()

    return receiving


def _adapter(body: bytes) -> Path | None:
    """Return the directory of the adapter that a request to update weights names, if it names one."""
    try:
        info = json.loads(body)["update_info"]
        return Path(info["path"]) if info["adapter"] and info["version"] else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _asked_for(body: bytes) -> int:
    """Return the policy version at the end of a request's cache salt; -1 if there is none."""
    # Parsing the body would be slow, because it may have megabytes of token ids. Prompt text cannot imitate the key,
    # because JSON escapes the quotes in it.
    at = body.find(_SALT_KEY)
    while at >= 0:
        if body[at - 1 : at] != b"\\" and (salt := _SALT.match(body, at)):
            return int(salt[1])
        at = body.find(_SALT_KEY, at + 1)
    return -1


def _exit_at_once() -> None:
    # A broken engine may never finish an orderly shutdown. Its core and workers are separate processes, and would keep
    # the GPU memory and the port.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(SHUTDOWN_EXIT_CODE)


def _version(body: bytes, field: str) -> int | None:
    if len(body) > LARGEST_CONTROL:
        return None
    try:
        version = str(json.loads(body)[field])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None  # weights were applied without a version, so the policy is unknown
    return int(version) if _VERSION.fullmatch(version) else None
