"""ASGI middleware that requires the run's secret as a bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from primeslurm.wire.names import GENERATE, STATUS_PATH
from primeslurm.wire.transport import secret

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Clients of these routes do not have the secret: routers read /health, monitoring reads /metrics, and the node agent
# reads the status. None of them reveals prompts or weights.
_OPEN = ("/health", "/metrics", STATUS_PATH)
# Routes that also accept a router's token (`wire.transport.secret.generate_token`): for generation, and for what a
# router that reads KV events asks prefill engines.
_ROUTER = (
    *(GENERATE, "/v1/completions", "/v1/chat/completions", "/v1/models"),
    *("/v1/completions/render", "/v1/chat/completions/render", "/kv_event_sources", "/server_info"),
)


class SecretGate:
    """Rejects requests without the run's secret. Subclasses override `serve` to handle authorised requests."""

    def __init__(self, app: App) -> None:
        self._app = app
        run_secret = secret.own_secret()  # raises SecretError: an engine without a secret does not start
        self._secret = f"Bearer {run_secret}".encode()
        self._generate_token = f"Bearer {secret.generate_token(run_secret)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no client of a run uses websockets
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._is_authorised(scope):
            await self.serve(scope, receive, send)
        else:
            await answer(send, 401, {"error": "the run's secret is missing or wrong"})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an authorised request."""
        await self._app(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path in _OPEN and scope["method"] == "GET":
            return True
        token = dict(scope["headers"]).get(b"authorization", b"")
        if path in _ROUTER and hmac.compare_digest(token, self._generate_token):
            return True
        return hmac.compare_digest(token, self._secret)


async def answer(send: Send, status: int, content: dict[str, Any] | msgspec.Struct | msgspec.Raw) -> None:
    raw = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
