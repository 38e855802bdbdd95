"""The gate in front of an engine that keeps the weights it was started with: a teacher's, or of `task: serve`.

A pure ASGI middleware (`vllm serve --middleware primeslurm.inference.liveness_gate.CoreGate`). While the core behind
the
server does not answer (`core_watch`), whoever asks how the engine is gets 504, and generation 503: routers and clients
leave it out, and its agent, which takes 504 for no answer at all, restarts it when that has lasted for too long.
"""

from __future__ import annotations

from primeslurm.inference.auth import App, Receive, Scope, SecretGate, Send, answer
from primeslurm.inference.engine_core_watchdog import EngineCoreWatchdog
from primeslurm.wire.names import STATUS_PATH

HEALTH_PATH = "/health"
_GENERATION = ("/v1/", "/inference/v1/")


class LivenessGate(SecretGate):
    """The middleware. Subclasses serve what a core is there for."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._core = EngineCoreWatchdog(app)
        self._controlled = 0
        """Requests under way that may keep the core for minutes; who makes them has a limit for that."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look after the core whenever somebody asks how the engine is; refuse what it cannot do."""
        path: str = scope["path"]
        asked = path in (STATUS_PATH, HEALTH_PATH)
        if asked:
            self._core.look(scope, busy=self._controlled > 0)
        if self._core.silent and (asked or generates(path)):
            await answer(send, 504 if asked else 503, {"error": self._core.words})
        else:
            await self.serve_live(scope, receive, send)

    async def serve_live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted request that the core, as far as is known, can take."""
        await self._app(scope, receive, send)


def generates(path: str) -> bool:
    """Whether a request to this path is for the model."""
    return path.startswith(_GENERATION)
