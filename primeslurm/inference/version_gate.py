"""The gate in front of an engine: it serves only while it holds a policy that the orchestrator has confirmed.

A pure ASGI middleware (`vllm serve --middleware primeslurm.inference.version_gate.VersionGate`). It learns the policy
version
by watching the control requests that pass through it, so it cannot disagree with the engine about what was applied.

    closed   no version confirmed since the process started, or an update failed, or a request asked for a newer
             version: /health and generation answer 503, so that a router leaves the engine out
    open     a version is set. It stays open during an update: generation is paused then, and requests wait
    silent   the core behind the server does not answer (`core_gate`): as closed, but status and /health answer 504

Every rollout request names, at the end of its cache salt, the version that was current when its group was opened. An
engine that missed an update, perhaps because the orchestrator cannot reach it while workers can, learns from the first
such request that it is behind. It refuses that request and all others until it has been updated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import uuid

import psutil

from primeslurm.inference.auth import App, Message, Receive, Scope, Send, answer
from primeslurm.inference.liveness_gate import HEALTH_PATH, LivenessGate, generates
from primeslurm.wire.names import ENGINE_HEADER, STATUS_PATH
from primeslurm.wire.weight_transfer.messages import EngineStatus

SHUTDOWN_PATH = "/primeslurm/shutdown"
SHUTDOWN_EXIT_CODE = 70

_VERSION_FIELDS = {"/finish_weight_update": "weight_version", "/update_weight_version": "new_version"}
_UPDATE_STEPS = ("/start_weight_update", "/update_weights", "/finish_weight_update")
_VERSION = re.compile("[0-9]{1,9}")
LARGEST_CONTROL = 1 << 20
"""Bytes of a control request that are looked at; what names a version has some tens."""
_SALT_KEY = b'"cache_salt"'
_SALT = re.compile(_SALT_KEY + rb'\s*:\s*"[^"\\]*:([0-9]{1,9})"')
_WATCHED = {*_UPDATE_STEPS, *_VERSION_FIELDS, "/init_weight_transfer_engine", "/pause", "/resume"}


class GateState:
    """What has been done to this engine since its process started."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.version: int | None = None
        self.asked_for = -1
        """The newest version that a request has asked for since the orchestrator last confirmed a version."""
        self.updating = False
        self.updates = 0
        """Updates begun; 0 = it still holds the weights that it loaded at start."""
        self.initialized = False
        self.paused = False

    @property
    def closed(self) -> str:
        """Return why the engine serves nothing; empty if it serves."""
        if self.version is None:
            return "stale: no policy version is confirmed on this engine"
        if self.version < self.asked_for:
            return f"stale: policy version {self.asked_for} was asked for, and this engine has version {self.version}"
        return ""

    def observe(self, path: str, body: bytes, ok: bool) -> None:
        """Take in one control request and whether it succeeded."""
        if path in _UPDATE_STEPS:
            self._observe_update(path, ok)
        if ok and path in _VERSION_FIELDS:
            self.version = _version(body, _VERSION_FIELDS[path])
            # The orchestrator may go back to an older policy. Requests that ask for a newer one are still refused.
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
        """Return the answer to GET /primeslurm/status. During an update the engine is at no version."""
        version = None if self.updating else self.version
        return EngineStatus(version, self.incarnation, self.paused, self.updates, self.initialized)


class VersionGate(LivenessGate):
    """The middleware."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._state = GateState()

    async def serve_live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse, watch, or pass on."""
        path: str = scope["path"]
        if path == STATUS_PATH:
            await answer(send, 200, self._state.report())
        elif path == SHUTDOWN_PATH and scope["method"] == "POST":
            await answer(send, 200, {"exit_code": SHUTDOWN_EXIT_CODE})
            asyncio.get_running_loop().call_later(0.1, _exit_at_once)  # after the answer is out
        elif (path == HEALTH_PATH or generates(path)) and self._state.closed:
            await answer(send, 503, {"error": self._state.closed})
        elif path in _WATCHED and scope["method"] == "POST":
            await self._watch(path, scope, receive, send)
        elif generates(path) and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless it asks for a newer policy; say in the answer whose answer it is."""
        body = await _whole(receive)
        if body is None:
            return
        self._state.asked_for = max(self._state.asked_for, _asked_for(body))
        if self._state.closed:
            await answer(send, 503, {"error": self._state.closed})
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receiving() -> Message:
            return messages.pop() if messages else await receive()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and scope.get("server"):
                host, port = scope["server"]
                named = (ENGINE_HEADER.lower().encode(), f"{host}:{port}".encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        await self._app(scope, receiving, sending)

    async def _watch(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()

        async def receiving() -> Message:
            message = await receive()
            body.extend(message.get("body", b"")[: LARGEST_CONTROL + 1 - len(body)])
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                # before the answer is out: the caller may act on it at once
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


async def _whole(receive: Receive) -> bytes | None:
    """Read the body of a request; None if its client hangs up."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _asked_for(body: bytes) -> int:
    """Return the policy version that a request's cache salt ends with; -1 if there is none.

    The body is not parsed: it may have megabytes of token ids. Text in a prompt that looks like a salt is no salt,
    because its quotes are escaped.
    """
    at = body.find(_SALT_KEY)
    while at >= 0:
        if body[at - 1 : at] != b"\\" and (salt := _SALT.match(body, at)):
            return int(salt[1])
        at = body.find(_SALT_KEY, at + 1)
    return -1


def _exit_at_once() -> None:
    # A broken engine may never finish an orderly shutdown. Its core and workers are processes of their own, and would
    # keep the accelerator's memory and the port.
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(SHUTDOWN_EXIT_CODE)


def _version(body: bytes, field: str) -> int | None:
    if len(body) > LARGEST_CONTROL:
        return None
    try:
        found = str(json.loads(body)[field])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None  # applied without a version of ours: nothing says which policy this is
    return int(found) if _VERSION.fullmatch(found) else None
