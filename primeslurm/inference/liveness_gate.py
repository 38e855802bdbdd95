"""ASGI middleware that reports an unresponsive engine core.

It serves engines whose weights never change: teachers, and those of `task: serve`. Use it with
`vllm serve --middleware primeslurm.inference.liveness_gate.LivenessGate`. While the engine core does not respond,
status requests get 504 and generation requests get 503. Routers and clients then avoid the engine, and its node agent,
which counts 504 as no response, restarts it after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

from primeslurm.base.unresponsive_timer import MAX_GAP_S
from primeslurm.inference.auth import App, Message, Receive, Scope, SecretGate, Send, answer
from primeslurm.wire.names import STATUS_PATH

# Only the core can answer this request, and does so between two steps. A core that is stopped, or that hangs in a
# collective or a kernel, does not.
PROBE_PATH = "/is_paused"
# Time without an answer after which a core is unresponsive [s]. Steps that compile nothing take a few seconds.
UNRESPONSIVE_S = 15.0
# Time without an answer after which the watchdog looks for running compilers [s].
COMPILER_CHECK_S = 5.0
# Programs that a core starts to compile kernels. DeepGEMM's kernels, for example, take minutes when first needed.
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "nvlink", "fatbinary", "ninja", "cc1plus", "g++", "gcc"})
HEALTH_PATH = "/health"
_GENERATION = ("/v1/", "/inference/v1/")


class EngineCoreWatchdog:
    """Measures for how long the engine core behind vLLM's HTTP application `app` has not answered."""

    def __init__(self, app: App, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self.compiling: Callable[[], bool] = _compiling
        self._probe_task: asyncio.Task[None] | None = None
        self._checked_at = clock()
        self.unanswered_s = 0.0  # Time without an answer, at the last check [s]

    @property
    def unresponsive(self) -> bool:
        return self.unanswered_s > UNRESPONSIVE_S

    def check(self, scope: Scope, *, busy: bool) -> None:
        """Check whether the core has answered, and send the next request, made from `scope`, if it has.

        `busy`: a control request, which may take minutes, is pending.
        """
        now = self._clock()
        if self._probe_task is None or self._probe_task.done():
            self.unanswered_s = 0.0
            self._probe_task = asyncio.create_task(self._probe(scope))
        elif busy or (self.unanswered_s >= COMPILER_CHECK_S and self.compiling()):
            self.unanswered_s = 0.0
        else:
            self.unanswered_s += min(now - self._checked_at, MAX_GAP_S)
        self._checked_at = now

    @property
    def message(self) -> str:
        return f"unresponsive: the engine core has not answered its HTTP server for {self.unanswered_s:.0f} s"

    async def _probe(self, scope: Scope) -> None:
        request = {
            "method": "GET",
            "path": PROBE_PATH,
            "raw_path": PROBE_PATH.encode(),
            "query_string": b"",
            "headers": [],
        }
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # this client never disconnects
            sent = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            return None

        with contextlib.suppress(Exception):  # an engine that failed ends by itself
            await self._app({**scope, **request}, receive, send)


def _compiling() -> bool:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() in COMPILERS:
                return True
    return False


class LivenessGate(SecretGate):
    """Refuses requests while the engine core is unresponsive. Subclasses override `serve_live`."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._core = EngineCoreWatchdog(app)
        # Number of pending control requests. They may block the core for minutes; their clients have time limits.
        self._controlled = 0

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

    def refusal(self, salt: str = "") -> str:
        """Return why a request with this cache salt is refused now; empty if it is served."""
        return self._core.message if self._core.unresponsive else ""

    async def serve_live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an authorised request to a responsive core."""
        await self._app(scope, receive, send)


def generates(path: str) -> bool:
    """Return whether requests to this path run the model."""
    return path.startswith(_GENERATION)
