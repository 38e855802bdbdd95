"""Who may ask an engine: whoever shows the run's secret as a bearer token. A pure ASGI middleware.

What is read-only and tells nothing of prompts or weights stays open, because it is read by those who do not have the
secret: `/health` by routers, `/metrics` by routers and monitoring, `/primeslurm/status` by the node's agent.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from primeslurm.wire.names import STATUS_PATH
from primeslurm.wire.transport import secret

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/health", "/metrics", STATUS_PATH)
_GENERATE = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/v1/models")
"""What the token of a router opens (`wire.transport.secret.generate_token`)."""


class SecretGate:
    """The middleware. Subclasses serve what was admitted.

    Raises:
        SecretError: this process was started without a secret; an engine that lets everybody in does not start.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        own = secret.own()
        self._secret = f"Bearer {own}".encode()
        self._generate_token = f"Bearer {secret.generate_token(own)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] == "websocket":  # nothing of a run uses them
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            await self.serve(scope, receive, send)
        else:
            await answer(send, 401, {"error": "the run's secret is missing or wrong"})

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted request."""
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path in _OPEN and scope["method"] == "GET":
            return True
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if path in _GENERATE and hmac.compare_digest(shown, self._generate_token):
            return True
        return hmac.compare_digest(shown, self._secret)


async def answer(send: Send, status: int, content: dict[str, Any] | msgspec.Struct) -> None:
    """Send JSON as the answer to a request."""
    raw = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
