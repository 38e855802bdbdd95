"""ASGI middleware that reports an unresponsive engine core.

It serves engines whose weights never change: teachers, and those of `task: serve`. Use it with
`vllm serve --middleware primeslurm.inference.liveness_gate.LivenessGate`. While the engine core does not respond,
status requests get 504 and generation requests get 503. Routers and clients then avoid the engine, and its node agent,
which counts 504 as no response, restarts it after a while.
"""

from __future__ import annotations

from primeslurm.inference.auth import App, Receive, Scope, SecretGate, Send, answer
from primeslurm.inference.engine_core_watchdog import EngineCoreWatchdog
from primeslurm.wire.names import STATUS_PATH

HEALTH_PATH = "/health"
_GENERATION = ("/v1/", "/inference/v1/")


class LivenessGate(SecretGate):
    """Refuses requests while the engine core is unresponsive. Subclasses override `serve_live`."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._core = EngineCoreWatchdog(app)
        self._controlled = 0
        """Number of pending control requests. They may block the core for minutes; their clients have time limits."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the core on each status request. Refuse status and generation requests while it is unresponsive."""
        path: str = scope["path"]
        is_status = path in (STATUS_PATH, HEALTH_PATH)
        if is_status:
            self._core.check(scope, busy=self._controlled > 0)
        if self._core.unresponsive and (is_status or generates(path)):
            await answer(send, 504 if is_status else 503, {"error": self._core.message})
        else:
            await self.serve_live(scope, receive, send)

    async def serve_live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an authorised request to a responsive core."""
        await self._app(scope, receive, send)


def generates(path: str) -> bool:
    """Return whether requests to this path run the model."""
    return path.startswith(_GENERATION)
