"""Does an engine's core go on behind its HTTP server? The server is another process, and answers for a core that hangs.

It is asked what only the core can answer, by vLLM's own route for it: the core takes such questions between two steps.
A core that is stopped, or waits in a collective or a kernel that never ends, owes the answer for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

from primeslurm.base.unresponsive_timer import MAX_GAP_S
from primeslurm.inference.auth import App, Message, Scope

QUESTION = "/is_paused"
SILENT_S = 15.0
"""A core that owes an answer for so long is not believed to serve. Its longest steps, those that compile kernels
apart, take a few seconds."""
OWED_S = 5.0
"""A core that owes one for so long is asked after otherwise: it may be compiling."""
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "nvlink", "fatbinary", "ninja", "cc1plus", "g++", "gcc"})
"""Programs by which cores compile kernels that they meet for the first time: DeepGEMM's take minutes in all."""


class EngineCoreWatchdog:
    """Counts the seconds for which a core has owed an answer. It asks anew at a look after the answer.

    Args:
        app: the engine's HTTP application.
    """

    def __init__(self, app: App, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self.compiling: Callable[[], bool] = _compiling
        self._question: asyncio.Task[None] | None = None
        self._looked_at = clock()
        self.silent_s = 0.0
        """At the last look."""

    @property
    def silent(self) -> bool:
        """Whether the core is not believed to serve."""
        return self.silent_s > SILENT_S

    def look(self, scope: Scope, *, busy: bool) -> None:
        """Take note of an answer, or of none.

        Args:
            scope: of the request that is being answered; the core's is made of it.
            busy: the core was told to do what may take minutes, and whoever told it has a limit for that.
        """
        now = self._clock()
        if self._question is None or self._question.done():
            self.silent_s = 0.0
            self._question = asyncio.create_task(self._ask(scope))
        elif busy or (self.silent_s >= OWED_S and self.compiling()):
            self.silent_s = 0.0
        else:
            self.silent_s += min(now - self._looked_at, MAX_GAP_S)
        self._looked_at = now

    @property
    def words(self) -> str:
        """Tell what is wrong."""
        return f"silent: the engine's core has not answered its HTTP server for {self.silent_s:.0f} s"

    async def _ask(self, scope: Scope) -> None:
        asked = {"method": "GET", "path": QUESTION, "raw_path": QUESTION.encode(), "query_string": b"", "headers": []}
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # whoever asks does not go away
            given = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            return None

        with contextlib.suppress(Exception):  # an engine that failed ends by itself
            await self._app({**scope, **asked}, receive, send)


def _compiling() -> bool:
    """Whether a process below this one is a compiler."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() in COMPILERS:
                return True
    return False
