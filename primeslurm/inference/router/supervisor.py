"""Starts vllm-router, and sees to it that it serves the workers of the plan. Level-triggered: nobody has to tell it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec

from primeslurm.base.parent_death import end_with_parent
from primeslurm.inference.router.child import RouterOrder
from primeslurm.inference.router.health_endpoint import RouterHealthEndpoint
from primeslurm.inference.router.workers import LARGEST_LIST, WorkerDifference, compare, listed, planned
from primeslurm.records.events.processes import RouterComplete, RouterIncomplete, RouterRestarted
from primeslurm.records.journal import Journal
from primeslurm.wire.transport import secret

PERIOD_S = 1.0
ANSWER_S = 5.0
REMEMBERED_BYTES = 4 * 2**30
"""A router that was shown so much of wrong tokens starts anew: it forgets none."""
FORGET_AGAIN_S = 600.0
"""For that, it starts anew at most so often: whoever shows them must not keep the run from its engines."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where something listens."""

    host: str
    port: int


@dataclass
class RouterSupervisor:
    """One router and its keeper.

    Args:
        argv: the router's options.
        router: where it listens.
        door: where the keeper listens.
        journal: gets an event when the router starts anew, when its workers are not those of the plan, and when they
            are again.
        remembered_bytes: of wrong tokens, after which it starts anew.
    """

    argv: Sequence[str]
    router: Address
    door: Address
    journal: Journal
    remembered_bytes: int = REMEMBERED_BYTES
    _difference: WorkerDifference = field(default=WorkerDifference(), init=False)
    _since: float = field(default=0.0, init=False)
    _known: bool = field(default=False, init=False)
    """The router that runs now has taken the secret."""
    _forgot: float = field(default=-math.inf, init=False)
    """When it last started anew for wrong tokens."""

    def __post_init__(self) -> None:
        self._wanted = planned(self.argv)
        self._own = secret.own()
        self._headers = secret.header()
        secret.keep()

    async def run(self) -> int:
        """Keep the router until it ends by itself, and return its exit code."""
        door = RouterHealthEndpoint(self._own, self._status, lambda: not self._difference)
        server = await door.serve(self.door.host, self.door.port)
        child = self._start(door)
        try:
            while (code := child.poll()) is None:
                if why := await self._round(door):
                    _log.warning("starts the router anew: %s", why)
                    self.journal.write(RouterRestarted(why))
                    child = await self._restart(child, door)
                await asyncio.sleep(PERIOD_S if self._known else PERIOD_S / 5)
            return code
        finally:
            server.close()
            _end(child)

    async def _round(self, door: RouterHealthEndpoint) -> str:
        """Compare once, and mend. Returns why the router has to be started anew; empty if it has not."""
        now = time.monotonic()
        if door.refused_bytes > self.remembered_bytes and now > self._forgot + FORGET_AGAIN_S:
            self._forgot = now
            return f"it was shown {door.refused_bytes >> 20} MiB of wrong tokens, which it keeps"
        answer = await self._ask("GET", "/list_workers")
        if answer is None:
            return ""  # it listens once an engine is open
        status, body = answer
        if status == 401:
            # It asked about the secret, got no answer, and will never ask again.
            return "it does not take the run's secret"
        has = listed(body) if status == 200 else None
        if has is None:
            return ""
        self._known = True
        found = compare(self._wanted, has)
        self._tell(found)
        if not found:
            return ""
        if self._wanted.disaggregated:
            return "between prefill and decode, it takes no workers while it runs"
        for verb, urls in (("remove", found.foreign), ("add", found.missing)):
            for url in urls:
                await self._ask("POST", f"/{verb}_worker?url={quote(url, safe='')}")
        return ""

    def _tell(self, found: WorkerDifference) -> None:
        now = time.monotonic()
        if found and found != self._difference:
            self._since = self._since or now
            _log.warning("workers are missing: %s; are not of the plan: %s", found.missing, found.foreign)
            has = len(self._wanted.urls) - len(found.missing)
            event = RouterIncomplete(has, len(self._wanted.urls), list(found.missing), list(found.foreign))
            self.journal.write(event)
        elif self._difference and not found:
            self.journal.write(RouterComplete(len(self._wanted.urls), now - self._since))
            self._since = 0.0
        self._difference = found

    async def _restart(self, child: subprocess.Popen[bytes], door: RouterHealthEndpoint) -> subprocess.Popen[bytes]:
        await asyncio.to_thread(_end, child)
        door.refused_bytes, self._known = 0, False
        return self._start(door)

    def _start(self, door: RouterHealthEndpoint) -> subprocess.Popen[bytes]:
        # Whoever kills the keeper alone must not leave a router behind that nobody keeps.
        child = subprocess.Popen(
            [sys.executable, "-m", "primeslurm.inference.router.child"],
            stdin=subprocess.PIPE,
            preexec_fn=end_with_parent,
        )
        assert child.stdin is not None
        keys = f"http://{self.door.host}:{self.door.port}{door.keys}"
        order = RouterOrder(list(self.argv), keys, secret.generate_token(self._own))
        with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
            stdin.write(msgspec.json.encode(order))
        return child

    async def _status(self, path: str) -> int | None:
        answer = await self._ask("GET", path)
        return None if answer is None else answer[0]

    async def _ask(self, method: str, path: str) -> tuple[int, bytes] | None:
        return await asyncio.to_thread(self._exchange, method, path)

    def _exchange(self, method: str, path: str) -> tuple[int, bytes] | None:
        connection = http.client.HTTPConnection(self.router.host, self.router.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read(LARGEST_LIST)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
