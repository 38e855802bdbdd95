"""Starts vllm-router and keeps its list of workers equal to the plan's."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec
import psutil

from primeslurm.base.parent_death import end_with_parent
from primeslurm.inference.router.child import RouterOrder
from primeslurm.inference.router.health_endpoint import RouterHealthEndpoint
from primeslurm.records.events.processes import RouterComplete, RouterIncomplete, RouterRestarted
from primeslurm.records.journal import Journal
from primeslurm.wire.decoding import DamagedError, decode_json
from primeslurm.wire.transport import secret

# Longest response to /list_workers that is read [bytes]. A thousand workers need a hundredth of it.
LARGEST_LIST = 16 << 20
PERIOD_S = 1.0
ANSWER_S = 5.0
# Total size of invalid tokens after which the router is restarted, because it caches all of them.
REFUSED_BYTES = 4 * 2**30
# Memory of the router's process after which it is restarted. With `policy: kv_aware` it never forgets where a block of
# tokens was, which takes about 11 bytes per token of new prompts and answers.
MEMORY_BYTES = 16 * 2**30
# Shortest time between two restarts because of tokens [s], so that a stranger with bad tokens cannot block the run.
RESTART_S = 600.0
_log = logging.getLogger(__name__)


class _Listed(msgspec.Struct):
    urls: list[str]


@dataclass(frozen=True)
class Workers:
    """The workers of a router, as URLs."""

    urls: frozenset[str]
    # Whether prefill and decode engines are separate. Such a router can drop workers, but cannot add any.
    disaggregated: bool = False


@dataclass(frozen=True)
class WorkerDifference:
    """Workers that a router lacks, and workers that it should not have, as URLs."""

    missing: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.foreign)


def workers_of_command(argv: Sequence[str]) -> Workers:
    """Return the workers that a router's command line names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--worker-urls", nargs="*", default=[])
    parser.add_argument("--prefill", nargs="+", action="append", default=[])
    parser.add_argument("--decode", nargs="+", action="append", default=[])
    options, _ = parser.parse_known_args(argv)
    separate = [words[0] for words in (*options.prefill, *options.decode)]  # a bootstrap port may follow the URL
    return Workers(frozenset((*options.worker_urls, *separate)), disaggregated=bool(separate))


def compare(wanted: Workers, listed_urls: Iterable[str]) -> WorkerDifference:
    # A router may list the data-parallel ranks of a server as `http://host:port@rank`.
    urls = {url.partition("@")[0].rstrip("/") for url in listed_urls}
    return WorkerDifference(tuple(sorted(wanted.urls - urls)), tuple(sorted(urls - wanted.urls)))


def listed_urls(body: bytes) -> list[str] | None:
    """Return the URLs in a response to /list_workers; None if the response is invalid."""
    try:
        return decode_json(body, _Listed).urls
    except DamagedError:
        return None


@dataclass(frozen=True)
class Address:
    """Host and port on which the router or the health endpoint listens."""

    host: str
    port: int


@dataclass
class RouterSupervisor:
    """Runs one vllm-router process, restarts it if necessary, and keeps its list of workers equal to the plan's."""

    # The journal gets an event when the router restarts, and when its workers differ from the plan or match it again.

    argv: Sequence[str]  # Options of vllm-router
    router: Address
    endpoint: Address
    journal: Journal
    refused_bytes_limit: int = REFUSED_BYTES
    memory_limit: int = MEMORY_BYTES
    _difference: WorkerDifference = field(default=WorkerDifference(), init=False)
    _incomplete_since: float = field(default=0.0, init=False)
    _accepted: bool = field(default=False, init=False)  # Whether the running router has accepted the run's secret
    _token_restart: float = field(default=-math.inf, init=False)  # Time of the last restart because of invalid tokens
    _memory_restart: float = field(default=-math.inf, init=False)  # Time of the last restart because of its memory

    def __post_init__(self) -> None:
        self._wanted = workers_of_command(self.argv)
        self._secret = secret.own_secret()
        self._headers = secret.header()
        secret.keep()

    async def run(self) -> int:
        """Supervise the router until it ends by itself, and return its exit code."""
        endpoint = RouterHealthEndpoint(self._secret, self._status, lambda: not self._difference)
        server = await endpoint.serve(self.endpoint.host, self.endpoint.port)
        child = self._start(endpoint)
        try:
            while (code := child.poll()) is None:
                if why := self._too_large(child.pid) or await self._round(endpoint):
                    _log.warning("restarting the router: %s", why)
                    self.journal.write(RouterRestarted(why))
                    await asyncio.to_thread(_end, child)
                    endpoint.refused_bytes, self._accepted = 0, False
                    child = self._start(endpoint)
                # The two lists are compared every period, so no notification is needed when an engine restarts.
                await asyncio.sleep(PERIOD_S if self._accepted else PERIOD_S / 5)
            return code
        finally:
            server.close()
            _end(child)

    def _too_large(self, pid: int) -> str:
        """Return why a router must be restarted if it uses too much memory; otherwise empty."""
        # Only its index of cached blocks never shrinks. A restart ends all requests, so it must not be frequent.
        now = time.monotonic()
        if "kv_aware" not in self.argv or now < self._memory_restart + RESTART_S:
            return ""
        with contextlib.suppress(psutil.NoSuchProcess):
            if (used := psutil.Process(pid).memory_info().rss) > self.memory_limit:
                self._memory_restart = now
                return f"it uses {used / 2**30:.1f} GiB of memory"
        return ""

    async def _round(self, endpoint: RouterHealthEndpoint) -> str:
        """Make the router's list of workers match the plan's. Return why the router must be restarted; empty if not."""
        now = time.monotonic()
        if endpoint.refused_bytes > self.refused_bytes_limit and now > self._token_restart + RESTART_S:
            self._token_restart = now
            return f"it has cached {endpoint.refused_bytes >> 20} MiB of invalid tokens"
        answer = await self._ask("GET", "/list_workers")
        if answer is None:
            return ""  # the router listens only once an engine is open
        status, body = answer
        if status == 401:
            # The router checked the secret when the endpoint did not answer, and caches the result forever.
            return "it rejects the run's secret"
        workers = listed_urls(body) if status == 200 else None
        if workers is None:
            return ""
        self._accepted = True
        difference = compare(self._wanted, workers)
        self._report(difference)
        if not difference:
            return ""
        if self._wanted.disaggregated:
            return "with prefill and decode engines it accepts no new workers while it runs"
        for verb, urls in (("remove", difference.foreign), ("add", difference.missing)):
            for url in urls:
                await self._ask("POST", f"/{verb}_worker?url={quote(url, safe='')}")
        return ""

    def _report(self, difference: WorkerDifference) -> None:
        now, planned_workers = time.monotonic(), len(self._wanted.urls)
        if difference and difference != self._difference:
            self._incomplete_since = self._incomplete_since or now
            missing, foreign = list(difference.missing), list(difference.foreign)
            _log.warning("missing workers: %s; workers outside the plan: %s", missing, foreign)
            self.journal.write(RouterIncomplete(planned_workers - len(missing), planned_workers, missing, foreign))
        elif self._difference and not difference:
            self.journal.write(RouterComplete(planned_workers, now - self._incomplete_since))
            self._incomplete_since = 0.0
        self._difference = difference

    def _start(self, endpoint: RouterHealthEndpoint) -> subprocess.Popen[bytes]:
        # end_with_parent: if only the supervisor is killed, its router must not run on.
        child = subprocess.Popen(
            [sys.executable, "-m", "primeslurm.inference.router.child"],
            stdin=subprocess.PIPE,
            preexec_fn=end_with_parent,
        )
        assert child.stdin is not None
        token_url = f"http://{self.endpoint.host}:{self.endpoint.port}{endpoint.token_path}"
        order = RouterOrder(list(self.argv), token_url, secret.generate_token(self._secret))
        with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
            stdin.write(msgspec.json.encode(order))
        return child

    async def _status(self, path: str) -> int | None:
        answer = await self._ask("GET", path)
        return None if answer is None else answer[0]

    async def _ask(self, method: str, path: str) -> tuple[int, bytes] | None:
        """Send a request to the router. Return status and body of the response; None if it does not answer."""
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
