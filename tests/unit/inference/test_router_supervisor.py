"""When the supervisor restarts its router. The clock is set by hand."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from benchmarks.support.ports import free_port
from primeslurm.inference.router import supervisor
from primeslurm.inference.router.health_endpoint import RouterHealthEndpoint
from primeslurm.inference.router.supervisor import REFUSED_BYTES, RESTART_S, Address, RouterSupervisor
from primeslurm.records.journal import Journal


@pytest.fixture(autouse=True)
def keep_secret_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor removes the secret from the environment, where other tests need it."""
    monkeypatch.setattr(supervisor.secret, "keep", lambda: None)


async def no_response(*_: object) -> None:
    """Act as a router that does not answer."""


async def test_router_restarts_at_intervals_after_many_invalid_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    monkeypatch.setattr(RouterSupervisor, "_ask", no_response)
    supervised = RouterSupervisor([], Address("x", 1), Address("x", 2), Journal(tmp_path, "router-0"))
    endpoint = RouterHealthEndpoint("secret", no_response, lambda: True)
    assert not await supervised._round(endpoint)
    endpoint.refused_bytes = REFUSED_BYTES + 1
    assert "invalid tokens" in await supervised._round(endpoint)
    now += RESTART_S
    assert not await supervised._round(endpoint)
    now += 1
    assert await supervised._round(endpoint)


async def test_router_that_uses_too_much_memory_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = iter([["sleep", "600"], *itertools.repeat(["true"], 50)])
    monkeypatch.setattr(RouterSupervisor, "_ask", no_response)
    monkeypatch.setattr(RouterSupervisor, "_start", lambda *_: subprocess.Popen(next(commands)))
    address = Address("127.0.0.1", free_port())
    supervised = RouterSupervisor(
        ["--policy", "kv_aware"], address, address, Journal(tmp_path, "router-0"), memory_limit=2**10
    )
    assert await supervised.run() == 0
    assert "GiB of memory" in Path(tmp_path, "events", "router-0.jsonl").read_text()


async def test_tokens_are_checked_only_at_the_secret_path() -> None:
    endpoint = RouterHealthEndpoint("secret", no_response, lambda: True)
    other = RouterHealthEndpoint("secret", no_response, lambda: True)
    path = endpoint.token_path
    for wrong in ("/key", "/key/", other.token_path, path + "/", path[:-1], "/key/\xff"):
        assert await endpoint.status(wrong, b"Bearer secret") == 404 == await endpoint.status(wrong, b"x" * 10**6)
    assert endpoint.refused_bytes == 0
    assert await endpoint.status(path, b"Bearer secret") == 200
    assert await endpoint.status(path, b"Bearer wrong") == 401 and endpoint.refused_bytes > 0
